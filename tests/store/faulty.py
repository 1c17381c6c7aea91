"""An etcd whose answers get lost: requests go through, or not, and the caller hears nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import grpc

from refitd.store.etcd import EtcdStore


class NoAnswer(grpc.RpcError):
    """What gRPC raises when the time is over."""

    def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.DEADLINE_EXCEEDED

    def details(self) -> str:
        return "Deadline Exceeded"


class Faulty:
    """A service whose ``method`` fails as ``plan`` says, call by call: "done", "lost", "ok"; then all is well.

    done: carried out, the answer is lost. lost: it never arrived. ``between`` runs after the first such call.
    """

    def __init__(self, service: Any, method: str, plan: list[str], between: Callable[[], Any] | None = None) -> None:
        self._service, self._method, self._plan, self._between = service, method, plan, between

    def __getattr__(self, name: str) -> Any:
        real = getattr(self._service, name)
        return self._call(real) if name == self._method and self._plan else real

    def _call(self, real: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            step = self._plan.pop(0)
            reply = real(*args, **options) if step != "lost" else None
            if step == "ok":
                return reply
            between, self._between = self._between, None
            if between:
                between()
            raise NoAnswer

        return call


def make_faulty(store: EtcdStore, service: str, method: str, *plan: str, between: Any = None) -> None:
    """Lose answers of ``store``'s next calls."""
    for endpoint in store._channel._endpoints:
        stubs = endpoint.stubs()
        faulty = Faulty(getattr(stubs, service), method, list(plan), between)
        endpoint._stubs = dataclasses.replace(stubs, **{service: faulty})
