"""Programs that build and ship the package; they are not part of it."""
