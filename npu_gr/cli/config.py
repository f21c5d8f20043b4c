"""npu-gr config: what a configuration may hold, as a schema and as a page."""

from __future__ import annotations

import click


@click.group(short_help="Schema and reference of configuration files.")
def config() -> None:
    """Print what a configuration file may hold."""


@config.command("schema", short_help="Print the JSON Schema of a configuration.")
@click.option("--router", "kind", flag_value="router", help="Of a router, instead of an instance.")
@click.option("--simulation", "kind", flag_value="simulation", help="Of npu-gr simulate.")
def schema(kind: str | None) -> None:
    """Print the JSON Schema of an instance's configuration, for editors and for CI.

    A file whose first line is `# yaml-language-server: $schema=schema.json` is completed and checked by it.
    """
    from npu_gr.tools.config_schema import text

    click.echo(text(kind or "instance"), nl=False)


@config.command("reference", short_help="Print every key with its meaning, as Markdown.")
def reference() -> None:
    """Print every key with what it takes, its default and its meaning: the page docs/configuration.md."""
    from npu_gr.tools.config_reference import reference as page

    click.echo(page(), nl=False)
