"""Studies that answer one question on published networks or on a language model."""
