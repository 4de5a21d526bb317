"""Every error a user can cause. Each message is one line that says what to do; callers print it without a traceback."""

from __future__ import annotations


class VerifyPDError(Exception):
    """Base of all errors raised on purpose."""


class ConfigError(VerifyPDError):
    """A setting is wrong or two settings contradict each other."""


class ModelError(VerifyPDError):
    """Weights or a model's config cannot be used."""


class HubError(ModelError):
    """A model cannot be fetched."""


class TokenizerError(VerifyPDError):
    """A tokenizer is missing, or two tokenizers differ."""


class MemoryBudgetError(ConfigError):
    """The memory budget cannot hold what was asked for."""


class RequestError(VerifyPDError):
    """One request is invalid; `param` names the offending field. Never harms another request."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class EngineError(VerifyPDError):
    """The engine cannot go on."""
