"""One node, or a few: phases, links, movers, repairs, hook and store."""

from __future__ import annotations

from panels import Json, Row, bars, board, choice, lines

NODE = '{instance=~"$instance"}'
RATE = "[$__rate_interval]"


def text() -> str:
    """The board as JSON text."""
    variables = [choice("instance", "Node", "label_values(refitd_build_info, instance)")]
    words = "What a node's daemon does: where refits spend their time, what its links carry, what broke and why."
    return board("refitd-node", "refitd: node", words, variables, rows())


def rows() -> list[Row]:
    """From time and bytes down to causes."""
    return [
        ("Where does the time go?", 8, _time()),
        ("What do the links carry?", 8, _links()),
        ("What broke, and why?", 8, _repairs()),
        ("Who is connected?", 8, _edges()),
    ]


def rate(metric: str, by: str, where: str = "") -> str:
    """Events a second on the chosen nodes."""
    return f'sum by ({by}) (rate({metric}{{instance=~"$instance"{where}}}{RATE}))'


def increase(metric: str, by: str) -> str:
    """Events in each interval of the picture."""
    return f"sum by ({by}) (increase({metric}{NODE}{RATE}))"


def _time() -> list[Json]:
    phases = rate("refitd_refit_duration_seconds_bucket", "le, phase", ', outcome="ok"')
    return [
        lines("Time in each phase, 95th percentile", "s",
              "How long good refits stay in a phase. A line at 60 s means 60 s or more.",
              (f"histogram_quantile(0.95, {phases})", "{{phase}}")),
        lines("Share of time by phase", "percentunit", "Seconds of a phase in each second, failed refits too.",
              (rate("refitd_refit_duration_seconds_sum", "phase, outcome"), "{{phase}} {{outcome}}")),
        lines("Time to plan, 95th percentile", "s", "Whole plans after a turn, and remainders after a failure.",
              (f"histogram_quantile(0.95, {rate('refitd_plan_duration_seconds_bucket', 'le, plan')})", "{{plan}}")),
    ]  # fmt: skip


def _links() -> list[Json]:
    achieved = f"max by (link) (refitd_achieved_bandwidth_bytes_per_second{NODE})"
    planned = f"max by (link) (refitd_planned_bandwidth_bytes_per_second{NODE})"
    return [
        lines("Bytes by link", "Bps", "Payload a second, by link and direction.",
              (rate("refitd_transfer_bytes_total", "link, direction"), "{{link}} {{direction}}")),
        lines("Bytes into each GPU", "Bps", "Payload a second that ranks bring in, by GPU.",
              (rate("refitd_transfer_bytes_total", "instance, gpu", ', direction="rx"'), "{{instance}} {{gpu}}")),
        lines("Bandwidth achieved and planned", "Bps", "Of the last transfer, while it ran; and what plans count on.",
              (achieved, "{{link}} achieved"), (planned, "{{link}} planned")),
    ]  # fmt: skip


def _repairs() -> list[Json]:
    return [
        bars("Lane turns", "Lanes that got other members or sources, by cause.",
             increase("refitd_lane_turns_total", "cause"), "{{cause}}"),
        bars("Repairs", "Communicators that were made again, by method.",
             increase("refitd_communicator_repair_duration_seconds_count", "method"), "{{method}}"),
        bars("Mover restarts", "Movers that died or hung and were replaced, by node.",
             increase("refitd_mover_restarts_total", "instance"), "{{instance}}"),
    ]  # fmt: skip


def _edges() -> list[Json]:
    return [
        lines("Clients, loans and movers", "short", "Connections to the hook, memory lent to us, movers by state.",
              (f"sum by (side) (refitd_hook_connections{NODE})", "{{side}} connected"),
              (f"sum by (side) (refitd_loans{NODE})", "{{side}} loans"),
              (f"sum by (state) (refitd_movers{NODE})", "movers {{state}}")),
        bars("Hook errors", "Error answers to trainers and engines, by code.",
             increase("refitd_hook_errors_total", "code"), "{{code}}"),
        lines("Store", "reqps", "Requests to the store, by kind.",
              (rate("refitd_store_requests_total", "kind"), "{{kind}}")),
    ]  # fmt: skip
