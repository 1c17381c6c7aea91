"""Logs: one event a line on stderr, JSON under a service manager, readable on a terminal.

Records of the standard library's logging, grpc's among them, take the same way.
"""

from __future__ import annotations

import logging
import os
import sys
from typing import Literal, TextIO

import structlog
from structlog.typing import Processor

Format = Literal["auto", "json", "console"]


def setup(level: str = "info", format: Format = "auto", stream: TextIO | None = None) -> None:  # noqa: A002
    """Send all logs of this process to ``stream`` (None: stderr). May be called again; the last call holds.

    Call it before grpc is imported: its C core writes to stderr past everybody, and is told not to.
    """
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    stream = sys.stderr if stream is None else stream
    handler = logging.StreamHandler(stream)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=_shared(),
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *_renderers(format, stream)],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    logging.captureWarnings(True)
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *_shared(),
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        wrapper_class=structlog.stdlib.BoundLogger,
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=False,
    )


def get_logger(name: str) -> structlog.stdlib.BoundLogger:
    """The logger of a module; bind() adds what it is about."""
    logger: structlog.stdlib.BoundLogger = structlog.stdlib.get_logger(name)
    return logger


def bind(
    logger: structlog.stdlib.BoundLogger,
    *,
    job: str | None = None,
    node: str | None = None,
    lane: str | None = None,
    publication: tuple[int, int] | None = None,
    attempt: int | None = None,
) -> structlog.stdlib.BoundLogger:
    """``logger`` with the keys that every room uses; a publication shows as ``generation.revision``."""
    shown = None if publication is None else f"{publication[0]}.{publication[1]}"
    keys = {"job": job, "node": node, "lane": lane, "publication": shown, "attempt": attempt}
    return logger.bind(**{key: value for key, value in keys.items() if value is not None})


def _shared() -> list[Processor]:
    return [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.add_log_level,
        structlog.stdlib.PositionalArgumentsFormatter(),
        structlog.stdlib.ExtraAdder(),
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]


def _renderers(format: Format, stream: TextIO) -> list[Processor]:  # noqa: A002
    terminal = stream.isatty()
    if format == "console" or (format == "auto" and terminal):
        plain = structlog.dev.plain_traceback  # never with local variables: they may hold secrets
        return [structlog.dev.ConsoleRenderer(colors=terminal, exception_formatter=plain)]
    return [structlog.processors.format_exc_info, structlog.processors.JSONRenderer(default=str)]
