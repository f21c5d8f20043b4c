"""npu-gr fleet: our instances in infrastructure that is there already: balancers, a Ray cluster, Kubernetes."""

from __future__ import annotations

import asyncio
from pathlib import Path

import click

from npu_gr.cli.options import API_KEY, CONFIG, FILE, SET, load_config, run_async


@click.group(short_help="Place requests by user in a balancer of yours.")
def fleet() -> None:
    """Place requests by user, as the router does, in infrastructure that you have already; and look after pods."""


def _add_balancer(name: str, about: str) -> None:
    @fleet.command(name, help=about)
    @CONFIG
    @SET
    def command(config_path: Path, overrides: tuple[str, ...]) -> None:
        from npu_gr.fleet.balancers import BALANCERS
        from npu_gr.router.config import load
        from npu_gr.router.discovery import find

        config = load(config_path, overrides)
        click.echo(BALANCERS[name](config, asyncio.run(find(config.discovery))), nl=False)


_add_balancer("envoy", "Print Envoy's configuration: MAGLEV.")
_add_balancer("haproxy", "Print HAProxy's: strict consistent hashing.")
_add_balancer("nginx", "Print nginx.conf: strict consistent hashing.")


@fleet.command("ray", short_help="Run instances on a Ray cluster until stopped.")
@CONFIG
@SET
@click.option("--instances", required=True, type=click.IntRange(1), help="At least so many, one a device.")
@click.option("--max-instances", type=click.IntRange(1), help="Autoscale up to so many.")
@click.option("--resource", default="CPU", show_default=True, type=click.Choice(["NPU", "GPU", "CPU"]))
@click.option("--host", default="127.0.0.1", show_default=True)
@click.option("--port", default=8090, show_default=True)
def ray(
    config_path: Path,
    overrides: tuple[str, ...],
    instances: int,
    max_instances: int | None,
    resource: str,
    host: str,
    port: int,
) -> None:
    """Run instances on a Ray cluster until stopped, and route requests by user.

    The cluster is that of RAY_ADDRESS; without it, a local one is started.
    """
    from npu_gr.fleet.ray_serve import RayOptions, deploy

    config = load_config(config_path, overrides)
    deploy(config, RayOptions(instances, max_instances or instances, resource, host, port))


@fleet.command("deletion-cost")
@click.option("--selector", required=True, help="Labels of the pods, as kubectl takes them.")
@click.option("--namespace", help="Of the pods; by default the one that this pod is in.")
@click.option("--api", help="Address of the API server; by default as every pod has it in its environment.")
@click.option("--account", type=FILE, help="Folder with the service account's token and ca.crt.")
@click.option("--port", default=8081, show_default=True, help="Admin port of the pods.")
@click.option("--plain", is_flag=True, help="The admin port has no TLS.")
@click.option("--server-name", help="That the certificates of the pods have.")
@click.option("--period", "period_s", default=60.0, show_default=True, type=click.FloatRange(1.0), help="Seconds.")
@click.option("--once", is_flag=True, help="Write the costs once, print what was written, and end.")
@API_KEY
def deletion_cost(
    selector: str,
    namespace: str | None,
    api: str | None,
    account: Path | None,
    port: int,
    plain: bool,
    server_name: str | None,
    period_s: float,
    once: bool,
    api_key: str | None,
) -> None:
    """Tell Kubernetes what a pod's removal costs.

    Writes the MiB of prefix KV that it holds into the annotation pod-deletion-cost, by which a scale-down of a
    Deployment takes the emptiest pods first. A StatefulSet does not read it. Runs until stopped, as a pod with a
    service account that may list and patch pods.
    """
    from npu_gr.core.calling import calling_context
    from npu_gr.core.signals import stop_signals
    from npu_gr.core.tasks import running
    from npu_gr.fleet.deletion_cost import ACCOUNT, ApiFailed, Watched, api_address, own_namespace, watching

    folder = account or ACCOUNT
    watched = Watched(
        api=(api or api_address()).rstrip("/"),
        namespace=namespace or own_namespace(folder),
        selector=selector,
        scheme="http" if plain else "https",
        port=port,
        server_name=server_name,
        api_key=api_key,
        account=folder,
    )

    async def work() -> None:
        async with watching(watched, calling_context()) as costs:
            if once:
                try:
                    written = await costs.write_once()
                except ApiFailed as error:
                    raise click.ClickException(str(error)) from error
                for name, cost in sorted(written.items()):
                    click.echo(f"{name}  {cost}")
                return
            with stop_signals() as signals:
                async with running(costs.keep_writing(period_s)):
                    await signals.get()

    run_async(work)
