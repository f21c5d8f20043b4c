"""npu-gr shadow: a ranker next to the served one, before it serves."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from npu_gr.cli.options import API_KEY, run_async

if TYPE_CHECKING:
    from npu_gr.core.served import ShadowInfo


@click.command(short_help="Score ranks with one more ranker; promote or drop it.")
@click.argument("checkpoint", required=False)
@click.option(
    "--share",
    default=0.1,
    show_default=True,
    type=click.FloatRange(0, 1, min_open=True),
    help="Fraction of the users whose ranks it scores.",
)
@click.option("--promote", is_flag=True, help="Serve it; a guard watches it for five minutes.")
@click.option("--drop", is_flag=True, help="Free it.")
@click.option(
    "--url",
    default="http://127.0.0.1:8081",
    show_default=True,
    help="Admin URL of an instance.",
)
@API_KEY
def shadow(
    checkpoint: str | None, share: float, promote: bool, drop: bool, url: str, api_key: str | None
) -> None:
    """Load CHECKPOINT, a folder on the instance's machine, next to the served ranker.

    It scores ranks when the device has nothing else to do. No client waits for it or sees it.
    Without CHECKPOINT: show what it has scored, and how it differs from the served ranker.
    """
    from npu_gr.replay.remote import call_shadow

    if bool(checkpoint) + promote + drop > 1:
        raise click.UsageError("give a CHECKPOINT, --promote or --drop, and no two of them")
    method = "POST" if checkpoint or promote else "DELETE" if drop else "GET"
    below = "/promote" if promote else ""
    body = {"path": checkpoint, "share": share} if checkpoint else None
    found = run_async(lambda: call_shadow(url, api_key, method, below, body))
    for line in lines_of(found):
        click.echo(line)


def lines_of(found: ShadowInfo) -> list[str]:
    """Describe a shadow in words."""
    last = [f"rolled back: {found.rolled_back}"] if found.rolled_back else []
    if found.state == "none":
        return ["there is no shadow", *last]
    skipped = ", ".join(f"{num} {reason}" for reason, num in found.skipped.items() if num)
    if found.state == "guarding":
        what = f"{found.version} serves and is watched for {found.guarded_for_s or 0:.0f} s more"
    else:
        what = f"{found.version} ({found.path}) scores {found.share:.0%} of the users"
    lines = [f"{what}, against {found.against}", f"scored {found.scored}; skipped: {skipped or 0}"]
    figures = {
        "best 10 shared": found.top_overlap,
        "same first": found.same_first,
        "correlation": found.correlation,
        "mean difference, sd": found.mean_difference,
        "median drift, sd": found.median_drift,
    }
    lines += [f"{name}: {value:.3f}" for name, value in figures.items() if value is not None]
    if found.answers:
        lines.append(f"npu-gr replay compare {found.answers}/served {found.answers}/shadow")
    return lines + last
