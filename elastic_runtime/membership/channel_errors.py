"""What goes wrong between a client and the membership service, as the caller sees it.

ElasticError
└── ChannelError (ConnectionError)          refused, reset, or nobody is there
    ├── ChannelTimeout (TimeoutError)       no answer in time
    └── WrongSecretError (PermissionError)  one of the two does not know the job's secret
"""

from __future__ import annotations

from elastic_runtime.errors import EXIT_TRY_AGAIN, ElasticError

__all__ = ["ChannelError", "ChannelTimeout", "WrongSecretError"]


class ChannelError(ElasticError, ConnectionError):
    """The service cannot be reached, or it ended the connection; trying again may help."""

    exit_code = EXIT_TRY_AGAIN


class ChannelTimeout(ChannelError, TimeoutError):
    """The service did not answer in the time that the caller gave."""


class WrongSecretError(ChannelError, PermissionError):
    """The other side does not know the secret of this job; trying again does not help."""
