"""The command line. Each subcommand imports what it needs when it is called: `refitd --help` costs nothing."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Callable, Mapping, Sequence

from refitd.errors import EX_CONFIG, ConfigError, RefitdError, Refused
from refitd.stdout import complain, say

Command = Callable[[argparse.Namespace], int]


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of ``refitd``. Exit status: 0 good, 1 the work failed, 2 usage, 78 bad configuration."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if argv[:1] == ["demo"]:
        from refitd.demo import main as demo

        return demo(argv[1:])
    if argv[:1] == ["bench"]:
        from refitd.bench import main as bench

        return bench(argv[1:])
    if argv[:1] == ["plan"]:
        from refitd.planning import main as plan

        return plan(argv[1:])
    arguments = _parser().parse_args(argv)
    command: Command = arguments.command
    try:
        return command(arguments)
    except ConfigError as error:
        return _fail(arguments, error, EX_CONFIG)
    except RefitdError as error:
        return _fail(arguments, error, 1)
    except KeyboardInterrupt:
        return 130


def whole_parser() -> argparse.ArgumentParser:
    """The parser of every command, also of those that parse for themselves: for completion and the man page."""
    from refitd.bench import arguments, pack, plan
    from refitd.demo import driver
    from refitd.planning.arguments import make_parser as plan_parser

    parser, bench = _parser(), arguments.make_parsers()[0]
    _graft(bench, {"plan": plan.make_parser(), "pack": pack.make_parser()})
    _graft(parser, {"demo": driver.make_parser(), "bench": bench, "plan": plan_parser()})
    return parser


def _graft(parser: argparse.ArgumentParser, commands: Mapping[str, argparse.ArgumentParser]) -> None:
    """Put real parsers in the place of those that only have a name and a help."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            action.choices.update(commands)


def _parser() -> argparse.ArgumentParser:
    from refitd.operate.arguments import add_parsers as add_operator_commands

    parser = argparse.ArgumentParser(
        prog="refitd", description="Fault-tolerant elastic refit: weights move shard to shard."
    )
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    commands.add_parser("demo", help="run trainers, engines and daemons on this machine, with faults if you like")
    commands.add_parser("bench", help="measure a refit against its rivals, or the planner")
    commands.add_parser("plan", help="what a refit would move, and how long it would take")
    run = commands.add_parser("run", help="run the daemon of this node")
    run.add_argument("--config", metavar="FILE", help="TOML file (default: none; REFITD_* and flags also count)")
    run.set_defaults(command=_run)
    config = commands.add_parser("config", help="check or show the configuration")
    config.add_argument("action", choices=["check", "show"])
    config.add_argument("--config", metavar="FILE", help="TOML file (default: none; REFITD_* and flags also count)")
    config.set_defaults(command=_config)
    for command in (run, config):
        command.add_argument("--set", metavar="SECTION.KEY=VALUE", action="append", default=[], help="override one key")
        command.add_argument("--json", action="store_true", help="one JSON object on the last line of stdout")
    add_operator_commands(commands)
    return parser


def _overrides(pairs: Sequence[str]) -> dict[str, str]:
    found = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals:
            raise ConfigError("--set", "SECTION.KEY=VALUE", pair)
        found[key] = value
    return found


def _run(arguments: argparse.Namespace) -> int:
    from refitd.config import Config, load
    from refitd.daemon.app import run
    from refitd.telemetry.logs import setup

    def read() -> Config:
        return load(arguments.config, overrides=_overrides(arguments.set))

    config = read()
    setup(config.log.level, config.log.format)
    try:
        return asyncio.run(run(config, read))
    except Refused as error:
        return _fail(arguments, error, EX_CONFIG if error.field.startswith("hook.") else 1)


def _config(arguments: argparse.Namespace) -> int:
    from refitd.config import load, show

    config = load(arguments.config, overrides=_overrides(arguments.set))
    if arguments.json:
        say(json.dumps({"ok": True, "reason": "", "config": show(config)}))
    else:
        say(show(config) if arguments.action == "show" else "the configuration is good")
    return 0


def _fail(arguments: argparse.Namespace, error: RefitdError, status: int) -> int:
    complain("refitd", error, arguments.json)
    return status


if __name__ == "__main__":
    sys.exit(main())
