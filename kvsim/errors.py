"""The two mistakes a user can make: a bad config, bad trace data."""


class UserError(Exception):
    """A mistake in what the user gave; its text says where, what came and what is allowed."""


class ConfigError(UserError):
    """One or more faults of a configuration; `faults` holds a line for each."""

    def __init__(self, faults: list[str]) -> None:
        super().__init__("\n".join(faults))
        self.faults = faults


class TraceError(UserError):
    """A fault of a trace file; names the file and, where there is one, the line and field."""
