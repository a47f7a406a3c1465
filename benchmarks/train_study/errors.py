"""An error that the user can correct; the command prints it without a traceback."""


class StudyError(ValueError):
    """An option, a loss or a network that cannot be had."""


class DataError(StudyError):
    """A data set that cannot be used, and why."""


class SettingsError(StudyError):
    """A folder that holds a study with other settings."""
