"""The body of a trainer process: step, publish, wait for the release, wait for the report; told when by the driver."""

from __future__ import annotations

import math
import os
from typing import Any

import refitd
from refitd.demo.drawn import Drawn
from refitd.demo.model import Training, settle
from refitd.demo.nursery import Options, tell
from refitd.demo.shards import TRAINERS_PER_NODE, fill_shards, trainer_mesh, trainer_shards
from refitd.demo.weights import Spec, Weights
from refitd.hook.wire import Connection, Message


def run(options: Options, driver: Connection, spec: Spec, weights: Weights, ids: Any) -> None:
    """Serve commands until the driver hangs up.

    ``options``: job, run, rank, world, socket, step (replayed before it reports ``ready``), and draws: the number of
    the run, where weights are drawn for each step instead of trained. Commands: ``step`` with step, release and commit
    (seconds to wait).
    """
    settle()
    os.environ["REFITD_SOCKET"] = options["socket"]
    start = {name: w.clone() for name, w in weights.items()}
    draws = options.get("draws")
    training = Drawn(start, draws) if draws else Training(start, spec, ids)
    training.advance(options["step"])
    shards = trainer_shards(training.weights, trainer_mesh(options["rank"] % TRAINERS_PER_NODE))
    trainer = refitd.connect_trainer(
        job=options["job"], run=options["run"], rank=options["rank"], world_size=options["world"]
    )
    trainer.register(refitd.Layout.from_tensors(shards))
    tell(driver, "ready", step=training.step)
    while True:
        command, _fds = driver.receive()
        _step(command, driver, trainer, training, shards)


def _step(
    command: Message, driver: Connection, trainer: Any, training: Drawn | Training, shards: dict[str, Any]
) -> None:
    step = int(command["step"])
    loss = training.advance(step)
    fill_shards(shards, training.weights)
    tell(driver, "publish", step=step, loss=None if math.isnan(loss) else loss)
    offer = trainer.publish(step, shards)
    outcome = offer.released(timeout=command["release"])
    tell(driver, "released", step=step, outcome=str(outcome))
    if command.get("overwrite"):
        _overwrite(shards)
    report = offer.committed(timeout=command["commit"])
    tell(driver, "report", step=step, report=None if report is None else report.to_json())


def _overwrite(shards: dict[str, Any]) -> None:
    """What a trainer may do once its weights are its own again."""
    for shard in shards.values():
        if shard.is_floating_point():
            shard.to_local().detach().fill_(1.0)
