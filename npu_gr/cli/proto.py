"""npu-gr proto: the .proto files of the gRPC services."""

from __future__ import annotations

import click

from npu_gr.core.errors import ConfigError


@click.command(short_help="Print a .proto file of the gRPC services.")
@click.argument("name", default="npu_gr.proto")
@click.option("--write", is_flag=True, help="Make npu_gr.proto anew of the table of kinds; needs grpcio-tools.")
def proto(name: str, write: bool) -> None:
    """Print npu_gr.proto, inference.proto or health.proto, to generate a client from."""
    from npu_gr.tools import proto as files

    if write:
        for path in files.write():
            click.echo(f"wrote {path}")
        return
    if name not in files.FILES:
        raise ConfigError(f"npu-gr proto: {name!r} is none of {', '.join(files.FILES)}")
    click.echo(files.shipped(name), nl=False)
