"""focalkern in the shapes of other libraries. Each module needs the library it is named after."""
