"""Every exception that edge_rt raises on purpose.

EdgeRTError
├── ConfigError        a setting, recipe or command line that cannot work; says which key
├── CheckpointError    a model directory that cannot be read as what it says it is; names the tensor
├── BundleError        a bundle that is damaged, foreign or of another version; says how to rebuild
├── RequestError       a request that can never be served; says what would fit
├── EngineError        the engine failed while it worked
├── PublishError       a broker could not be told; says what was to be said and why not
└── MissingLibraryError   a library of an extra is not installed; says how to install it

A message says what was found, what was expected and what to do. `assert` is left for invariants.
"""

from __future__ import annotations

import sys


class EdgeRTError(Exception):
    """Base of all of them; the command line prints its message and exits with 1."""


class ConfigError(EdgeRTError):
    """A setting, recipe or command line that cannot work; the command line exits with 2."""


class CheckpointError(EdgeRTError):
    """A model directory that cannot be read as what it says it is."""


class BundleError(EdgeRTError):
    """A bundle that is damaged, foreign, or written by another version."""


class RequestError(EdgeRTError):
    """A request that can never be served by this engine."""


class EngineError(EdgeRTError):
    """The engine failed while it worked."""


class PublishError(EdgeRTError):
    """A broker could not be told."""


class MissingLibraryError(EdgeRTError):
    """Libraries of an extra are needed and not installed; `library` is one, or several."""

    def __init__(self, library: str, extra: str) -> None:
        names = library.split()
        super().__init__(
            f"{', '.join(names)} {'is' if len(names) == 1 else 'are'} not installed; install with: "
            f"{sys.executable} -m pip install {library} (part of edge_rt's extra '{extra}')"
        )
