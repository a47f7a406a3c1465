"""focalkern with the interfaces of other libraries. Each module needs the library of its name."""
