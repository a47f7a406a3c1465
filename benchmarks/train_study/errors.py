"""An error that the user can correct; the command prints it without a traceback."""


class StudyError(ValueError):
    """An option, a loss or a network that does not exist."""


class DataError(StudyError):
    """A data set that cannot be used; the message gives the reason."""


class SettingsError(StudyError):
    """A folder that holds a study with other settings."""
