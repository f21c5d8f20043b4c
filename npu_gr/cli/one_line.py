"""What each command does, in the line that the help of its group has for it: click cuts a longer sentence."""

from __future__ import annotations

import click

LINES = {
    "bundle": "Fetch what a report of a fault needs.",
    "calibrate": "Measure what the trigger must know of this machine.",
    "check-config": "Check a configuration and all that it names.",
    "demo": "Train, serve and replay MovieLens-100K, and report.",
    "doctor": "Say which of our ops work on this machine.",
    "erase-check": "Search everywhere for a user who was erased.",
    "fleet": "Place requests by user in a balancer of yours.",
    "fleet envoy": "Print Envoy's configuration: MAGLEV.",
    "fleet haproxy": "Print HAProxy's: strict consistent hashing.",
    "fleet nginx": "Print nginx.conf: strict consistent hashing.",
    "fleet ray": "Run instances on a Ray cluster until stopped.",
    "judge": "Evaluate a running service on users' last events.",
    "keys list": "List the keys of a file.",
    "keys new": "Make a key, add it to the file, and print it.",
    "load": "Load a log into the history store.",
    "monitor": "Serve the demo beside Prometheus and dashboards.",
    "record": "Record a service's requests, or purge recordings.",
    "record purge": "Remove the records of erased users now.",
    "record run": "Record a running service's requests.",
    "replay": "Replay a query log, compare runs, convert logs.",
    "replay compare": "Compare two runs of one log, score by score.",
    "replay convert": "Make query logs of other data.",
    "replay convert mooncake": "Arrivals of a trace over histories of ratings.",
    "replay convert ratings": "Ranks of each user's newest events.",
    "replay run": "Replay a query log open loop.",
    "simulate": "Predict a fleet on a virtual clock.",
    "simulate fit-device": "Fit a device's profile to a running instance.",
    "simulate fit-users": "Fit the model of users to a query log.",
    "simulate run": "Simulate instances behind the router.",
    "store check": "Compare every entry with its checksum.",
    "store repair": "Save every whole entry into a new file.",
    "train all": "Train every model of a dataset: a site to serve.",
    "train generate": "Train a semantic-ID generator.",
    "train match": "Train vectors of two domains that share users.",
    "train rank": "Train an HSTU ranker.",
}


def describe(main: click.Group) -> None:
    """Give every command of the table its line."""
    for path, line in LINES.items():
        command: click.Command = main
        for name in path.split():
            assert isinstance(command, click.Group)
            command = command.commands[name]
        command.short_help = line
