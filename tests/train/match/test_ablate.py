"""The ablation: resumable by run, a table and a plot of what is on record; the paired interval."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from npu_gr.cli.main import main
from npu_gr.core.errors import DataError
from npu_gr.matching.vectors import load
from npu_gr.train.match.ablate import WAYS, Plan, ablate, read_runs
from npu_gr.train.match.arms import ARMS, EXPORT, POPULARITY
from npu_gr.train.match.command import best_baseline, compare, markdown, plot
from npu_gr.train.next_item import difference
from tests.train.match.synthetic import domains, quick, write

SHORT = quick(source_steps=4, target_steps=4, inter_steps=4, evaluate_every=4)
SHOWN = (POPULARITY, "PureSVD, both", "ItemKNN, target", "target only", "+ curriculum", EXPORT)
PLAN = Plan(SHORT, densities=(0.5, 1.0), seeds=(0, 1), arms=SHOWN, num_validation=40, cold=False)


def test_it_goes_on_after_an_interruption_and_ends_the_same(tmp_path: Path) -> None:
    both = domains(tmp_path)
    whole = ablate(both, PLAN, tmp_path / "whole")

    class Stop(Exception):
        pass

    trained: list[str] = []

    def stop_in_the_second_seed(name: str, _step: object) -> None:
        trained.append(name)
        if "seed 1" in name:
            raise Stop

    with pytest.raises(Stop):
        ablate(both, PLAN, tmp_path / "cut", stop_in_the_second_seed)
    with (tmp_path / "cut" / "runs.jsonl").open("a") as file:
        file.write('{"key": "cut sh')
    on_record = len(read_runs(tmp_path / "cut"))
    assert 0 < on_record < len(whole)
    trained.clear()
    again = ablate(both, PLAN, tmp_path / "cut", lambda name, _: trained.append(name))
    assert not any("50% of the target, seed 0" in name for name in trained)
    assert [replace(run, train_s=0.0) for run in again] == [replace(run, train_s=0.0) for run in whole]
    assert ablate(both, PLAN, tmp_path / "cut") == again


def test_a_broken_record_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "runs.jsonl").write_text("nonsense\n{}\n")
    with pytest.raises(DataError, match=r"runs.jsonl, line 1"):
        read_runs(tmp_path)


def test_the_table_and_the_plot_show_every_arm(tmp_path: Path) -> None:
    runs = ablate(domains(tmp_path), PLAN, tmp_path / "runs")
    table = markdown(tmp_path / "runs", runs)
    assert table.count("### ") == 2
    for arm in PLAN.arms:
        assert table.count(f"\n| {arm} | 2 |") == 2
    assert table.count("| + curriculum | target only | ") == 2
    assert table.count("(the best baseline)") == 4
    assert set(PLAN.arms) < set(ARMS)
    best = best_baseline(runs, 0.5)
    assert best in {"PureSVD, both", "ItemKNN, target"}
    gain = compare(tmp_path / "runs", runs, EXPORT, POPULARITY, 0.5)
    assert gain is not None
    half = [run for run in runs if run.density == 0.5]
    ours, theirs = (np.mean([run.hit_50 for run in half if run.arm == arm]) for arm in (EXPORT, POPULARITY))
    assert gain.mean == pytest.approx(ours - theirs)
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    plot(runs, tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_cold_users_are_asked_for_once_and_by_every_way(tmp_path: Path) -> None:
    both = domains(tmp_path)
    plan = PLAN._replace(arms=(POPULARITY,), densities=(1.0,), cold=True)
    runs = ablate(both, plan, tmp_path / "runs")
    cold = {run.arm: run for run in runs if run.arm.startswith("cold users: ")}
    assert list(cold) == [f"cold users: {way}" for way in WAYS]
    shared = (both.source.degrees()[0] > 0) & (both.target.degrees()[0] > 0)
    assert {run.num_tested for run in cold.values()} == {int(shared[both.test.users].sum())}
    # The taste is the source's: who knows it beats popularity.
    assert cold["cold users: joint SVD"].hit_50 > cold["cold users: popularity"].hit_50 + 0.1
    assert ablate(both, plan, tmp_path / "runs") == runs
    assert "| cold users: export | 2 |" in markdown(tmp_path / "runs", runs)
    # Another seed has other folds, and the same users in the same order.
    popular = [run for run in runs if run.arm == "cold users: popularity"]
    one, other = (np.load(tmp_path / "runs" / f"{run.key}.npz")["full"] for run in popular)
    assert [run.seed for run in popular] == [0, 1]
    assert np.corrcoef(one, other)[0, 1] > 0.4


def test_the_interval_knows_a_difference_from_noise() -> None:
    random = np.random.default_rng(0)
    base = random.random((5, 2000)) < 0.1
    better = base | (random.random((5, 2000)) < 0.03)
    found = difference(better, base)
    assert found.mean == pytest.approx((better.astype(float) - base).mean())
    assert 0 < found.low < found.mean < found.high
    assert found.p < 0.001
    noise = difference(random.random((5, 2000)) < 0.1, base)
    assert noise.low < 0 < noise.high
    assert noise.p > 0.01
    assert difference(base, base).p == 1


def test_the_command_trains_exports_and_ablates(tmp_path: Path) -> None:
    source, target = map(str, write(tmp_path))
    short = [f"--set={name}=4" for name in ("source_steps", "target_steps", "inter_steps", "evaluate_every")]
    options = [*short, "--set=dim=8", "--num-validation=40", "--threads=1"]
    out = CliRunner().invoke(main, ["train", "match", source, target, "--out", str(tmp_path / "v"), *options])
    assert out.exit_code == 0, out.output
    vectors = load(tmp_path / "v")
    assert vectors.version in out.output
    assert len(vectors.users) == 160
    assert "the strongest baseline" in out.output
    assert "EASE, both: hit_10" in out.output
    assert set(vectors.figures) >= {"hit_50", "hit_50_twins", "validation_smooth_hit"}
    assert not (tmp_path / "v" / "training.state").exists()
    words = ["train", "match", source, target, "--out", str(tmp_path / "a"), "--ablate", "--seeds=1", "--density=0.8"]
    out = CliRunner().invoke(main, [*words, *options])
    assert out.exit_code == 0, out.output
    assert "| shared user embedding | 1 |" in (tmp_path / "a" / "ablation.md").read_text()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--set", "tua=1"], "unknown key tua; did you mean tau?"),
        (["--set", "tau=0"], "> 0"),
        (["--preset", "best"], "'best' is none of sccdr, target-only"),
        (["--density", "1.5"], "1.5 is not in"),
    ],
)
def test_bad_options_are_one_line(words: list[str], says: str, tmp_path: Path) -> None:
    source, target = map(str, write(tmp_path))
    out = CliRunner().invoke(main, ["train", "match", source, target, "--out", str(tmp_path / "v"), *words])
    assert out.exit_code == 2
    assert says in out.output
