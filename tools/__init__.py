"""What builds and ships the package; not part of it."""
