"""Makes etcd3 0.12.0 importable beside protobuf 4.25 and later; import this before etcd3.

etcd3's generated modules are of 2020 and modern protobuf refuses them. The message descriptors inside them are
still good, so ``etcd3.etcdrpc`` is built from those bytes, in a descriptor pool of its own so that another etcd
client in the process does not clash with it.
"""

from __future__ import annotations

import ast
import importlib.util
import pathlib
import sys
import types
from typing import Any

from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.internal.enum_type_wrapper import EnumTypeWrapper
from google.protobuf.message_factory import GetMessageClass

_MODULE = "etcd3.etcdrpc"


def _serialized(path: pathlib.Path) -> bytes:
    """The bytes of ``serialized_pb=`` in a generated module, read without running it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.keyword) and node.arg == "serialized_pb":
            value = node.value.args[0] if isinstance(node.value, ast.Call) else node.value
            raw = ast.literal_eval(value)
            return raw if isinstance(raw, bytes) else str(raw).encode("latin1")
    raise ImportError(f"no serialised descriptor in {path}")


def _kind(method: Any) -> str:
    ends = (method.client_streaming, method.server_streaming)
    return "_".join("stream" if streaming else "unary" for streaming in ends)


def _stub(service: Any) -> type:
    calls = [
        (
            m.name,
            _kind(m),
            f"/{service.full_name}/{m.name}",
            GetMessageClass(m.input_type),
            GetMessageClass(m.output_type),
        )
        for m in service.methods
    ]

    def __init__(self: Any, channel: Any) -> None:  # noqa: N807 - it becomes the method of the class made below
        for name, kind, path, request, reply in calls:
            call = getattr(channel, kind)(
                path, request_serializer=request.SerializeToString, response_deserializer=reply.FromString
            )
            setattr(self, name, call)

    return type(f"{service.name}Stub", (), {"__init__": __init__})


def _fill(module: types.ModuleType, file: Any) -> None:
    for name, descriptor in file.message_types_by_name.items():
        setattr(module, name, GetMessageClass(descriptor))
    for name, descriptor in file.enum_types_by_name.items():
        setattr(module, name, EnumTypeWrapper(descriptor))
    for name, descriptor in file.services_by_name.items():
        setattr(module, f"{name}Stub", _stub(descriptor))


def install() -> None:
    """Put the rebuilt ``etcd3.etcdrpc`` in place, once. Raises ImportError without etcd3."""
    if _MODULE in sys.modules:
        return
    spec = importlib.util.find_spec("etcd3")
    if spec is None or not spec.submodule_search_locations:
        raise ImportError("etcd3 is not installed")
    root = pathlib.Path(spec.submodule_search_locations[0]) / "etcdrpc"
    pool, module = DescriptorPool(), types.ModuleType(_MODULE)
    for name in ("kv", "auth", "rpc"):
        proto = FileDescriptorProto.FromString(_serialized(root / f"{name}_pb2.py"))
        pool.Add(proto)
        _fill(module, pool.FindFileByName(proto.name))
    sys.modules[_MODULE] = module
