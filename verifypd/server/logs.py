"""Log lines of the server: one line an event, as text or JSON. Callers decide what they say."""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Any


def escape(text: str) -> str:
    """Text without control characters: what a client sends can neither begin a line nor move the terminal's cursor."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else _escaped(char) for char in text)


def _escaped(char: str) -> str:
    return f"\\u{ord(char):04x}" if ord(char) < 1 << 16 else json.dumps(char)[1:-1]


def shown(value: Any) -> str:
    """A field's value in a line of text; quoted where it could be taken for several fields."""
    text = str(value)
    return escape(json.dumps(text, ensure_ascii=False) if any(char in text for char in ' ="') else text)


class Lines(logging.Formatter):
    """Time, level, who, event; and the fields given as `extra={"fields": {…}}`."""

    def __init__(self, form: str, who: str) -> None:
        super().__init__()
        self.form = form
        self.who = who

    def format(self, record: logging.LogRecord) -> str:
        """One line."""
        fields: dict[str, Any] = getattr(record, "fields", {})
        message = escape(record.getMessage())
        if record.exc_info:
            trace = self.formatException(record.exc_info).splitlines()
            message += "".join("\n    " + escape(line) for line in trace)
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z"
        if self.form == "json":
            head = {"time": stamp, "level": record.levelname.lower(), "process": self.who, "event": message}
            return escape(json.dumps({**head, **fields}, ensure_ascii=False, default=str))
        rest = " ".join(f"{name}={shown(value)}" for name, value in fields.items())
        return f"{stamp} {record.levelname.lower()} {self.who}: {message}{' ' + rest if rest else ''}"


def set_up_logs(form: str, who: str, level: int = logging.INFO) -> None:
    """Send every log of this process to standard error in one format."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(Lines(form, who))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
    logging.captureWarnings(True)
    for noisy in ("uvicorn", "uvicorn.error", "uvicorn.access", "asyncio"):
        logger = logging.getLogger(noisy)
        logger.handlers[:] = []
        logger.propagate = True
        logger.setLevel(logging.WARNING)


def event(logger: logging.Logger, message: str, level: int = logging.INFO, **fields: Any) -> None:
    """Log an event with fields."""
    logger.log(level, message, extra={"fields": fields})
