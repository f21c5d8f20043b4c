"""Every alert fires when it should and not before, says promtool.

The recordings give the ratios counted by hand.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from npu_gr.metrics.rules import rules
from npu_gr.metrics.slo import Promise
from npu_gr.service.config import SLOConfig
from tests.metrics.test_dashboards import ROOT

OBJECTIVES = SLOConfig().objectives()
RULES = rules(OBJECTIVES)
ALERTS = {
    rule["alert"]: rule for group in RULES["groups"] for rule in group["rules"] if "alert" in rule
}


class Case(NamedTuple):
    """Series as promtool writes them, one sample a minute.

    Alerts that fire at that minute, with their labels.
    """

    series: dict[str, str]
    minute: int
    fires: dict[str, dict[str, str]]
    quiet: list[str]


def burning(kind: str, promise: Promise) -> list[Case]:
    """Much too fast, a little too fast, within the objective, over it; few and rare requests."""
    name = f"NpuGr{kind.title()}{promise.value.title()}"
    fast, slow = f"{name}FastBurn", f"{name}SlowBurn"
    bad = "slow" if promise is Promise.LATENCY else "failed"
    share = 10 if promise is Promise.LATENCY else 1  # in a thousand: the error budget

    def counted(good: str, broken: str) -> dict[str, str]:
        return {
            f'npu_gr_slo_requests_total{{kind="{kind}",result="good"}}': good,
            f'npu_gr_slo_requests_total{{kind="{kind}",result="{bad}"}}': broken,
        }

    def labels(window: str) -> dict[str, str]:
        slo = f"{kind}-{promise.value}"
        ids = {"sloth_id": f"npu_gr-{slo}", "sloth_service": "npu_gr", "sloth_slo": slo}
        return {**ids, "sloth_window": window}

    def at(burn: float, minutes: int) -> dict[str, str]:
        broken = round(burn * share)
        return counted(f"0+{1000 - broken}x{minutes}", f"0+{broken}x{minutes}")

    ended = counted("0+800x60 48000+1000x40", "0+200x60 12000+0x40")
    return [
        Case(at(20, 70), 70, {fast: labels("5m"), slow: labels("2h")}, []),
        Case(at(8, 70), 70, {fast: labels("30m"), slow: labels("2h")}, []),
        Case(at(4, 70), 70, {slow: labels("2h")}, [fast]),
        Case(at(2, 70), 70, {slow: labels("6h")}, [fast]),
        Case(at(0, 70), 70, {}, [fast, slow]),
        Case(ended, 100, {slow: labels("2h")}, [fast]),
        Case(counted("0x80", "0x40 1x9 2x9 3x9 4x9"), 70, {}, [fast, slow]),
        # as long as all are bad
        Case(counted("0x420", HOURLY), RARE_MINUTE, {fast: labels("6h"), slow: labels("2h")}, []),
        Case(counted(HOURLY, HOURLY), RARE_MINUTE, {slow: labels("2h")}, [fast]),
        Case(counted(HOURLY, "0x200 1x220"), RARE_MINUTE, {}, [fast, slow]),
    ]


INSTANCE = {"instance": "a"}
RECORDED = 'npu_gr_recorded_total{instance="a",result="%s"}'
RECORDER_ON = 'npu_gr_recorder_on{instance="a",enabled="%s"}'
ASKED = 'npu_gr_slo_requests_total{instance="a",kind="rank",result="good"}'
STDOUT = {"instance": "a", "stream": "stdout"}
DEVICE = {"instance": "a", "worker": "device_0"}
RECORDER = {"instance": "a", "worker": "recorder"}
SWITCHED = 'npu_gr_prefix_cache_switched_off{instance="a"}'
ROLLED_BACK = 'npu_gr_guard_rollbacks_total{instance="a",reason="items"}'
ADMITTED = 'npu_gr_admissions_total{instance="a",kind="rank",verdict="admitted"}'
SHED = 'npu_gr_admissions_total{instance="a",kind="rank",verdict="overloaded"}'
WASTED = 'npu_gr_prefill_wasted_total{instance="a",kind="rank"}'
COPIED_BACK = 'npu_gr_signal_verdicts_total{instance="a",verdict="reload"}'
PREINFERS = 'npu_gr_signal_verdicts_total{instance="a",verdict="preinfer"}'
FALLBACKS = "npu_gr_backend_fallbacks_total"
ERRORS = 'npu_gr_relay_errors_total{instance="a",where="reload"}'
FAILURES = 'npu_gr_selfcheck_failures_total{instance="a"}'
AGE = 'npu_gr_catalogue_age_seconds{instance="a"}'
STALE, KEYS = 'npu_gr_api_keys_file_stale{instance="a"}', 'npu_gr_api_keys{instance="a"}'
WRONG = 'npu_gr_api_keys_rejected_total{instance="a",reason="unknown"}'
RELOAD = 'npu_gr_last_reload_successful{instance="a",what="configuration"}'
EXPIRES = 'npu_gr_tls_certificate_expires_at_seconds{instance="a",of="server"}'
BREAKER = 'npu_gr_store_breaker_open{instance="a",store="%s",lane="writes"}'
CALLS = 'npu_gr_store_calls_total{instance="a",operation="%s",result="%s"}'
USERS = 'npu_gr_user_features_total{instance="a",source="%s"}'
DEGRADED = 'npu_gr_history_degraded_total{instance="a",source="last_known",fault="store_slow"}'
UP, READY = 'up{instance="a",job="npu_gr"}', 'npu_gr_ready{instance="a"}'
OTHER_UP, OF_OPERATOR = 'up{instance="b",job="npu_gr"}', 'up{instance="a",job="shop/npu-gr"}'
ROUTER_UP = 'up{instance="r",job="npu_gr_router"}'
RARE_MINUTE = 365  # within 6 h of the first of them
HOURLY = "0x59 1x59 2x59 3x59 4x59 5x59 6x59"  # one request an hour


def stuck(worker: str, value: int) -> dict[str, str]:
    return {f'npu_gr_work_late{{instance="a",worker="{worker}"}}': f"{value}x9"}


def unrecorded(written: int) -> dict[str, str]:
    return {
        RECORDER_ON % "true": "1x90",
        ASKED: "0+60x90",
        RECORDED % "written": f"0+{written}x90",
        RECORDED % "dropped": "0x90",
    }


def held(live: int, reserved: int) -> dict[str, str]:
    return {
        'npu_gr_kv_bytes{instance="a",tier="hbm",state="live"}': f"{live}x5",
        'npu_gr_kv_bytes{instance="a",tier="hbm",state="reserved"}': f"{reserved}x5",
        'npu_gr_kv_bytes{instance="a",tier="hbm",state="evictable"}': "40x5",
        'npu_gr_kv_budget_bytes{instance="a",tier="hbm"}': "100x5",
    }


def lag(quick: int, slow: int) -> dict[str, str]:
    name = 'npu_gr_event_loop_lag_seconds_bucket{instance="a",le="%s"}'
    counts = {"0.01": quick, "0.05": quick + slow, "+Inf": quick + slow}
    return {name % edge: f"0+{count}x30" for edge, count in counts.items()}


def froze(times: int) -> dict[str, str]:
    return {'npu_gr_event_loop_freezes_total{instance="a"}': f"0x20 {times}x10"}


def dropped(lines: int) -> dict[str, str]:
    return {'npu_gr_log_lines_dropped_total{instance="a",stream="stdout"}': f"0+{lines}x30"}


def shed(rejected: int, admitted: int) -> dict[str, str]:
    return {SHED: f"0+{rejected}x20", ADMITTED: f"0+{admitted}x20"}


def wasted(evicted: int, produced: int) -> dict[str, str]:
    return {WASTED: f"0+{evicted}x70", PREINFERS: f"0+{produced}x70"}


def calls(operation: str, result: str, bad: int, good: int) -> dict[str, str]:
    return {CALLS % (operation, result): f"0+{bad}x20", CALLS % (operation, "ok"): f"0+{good}x20"}


def disk(free: int) -> dict[str, str]:
    name = 'npu_gr_store_disk_%s{instance="a"}'
    return {name % "free_bytes": f"{free}x20", name % "bytes": "100x20"}


def degraded(num: int, reads: int) -> dict[str, str]:
    return {DEGRADED: f"0+{num}x20", CALLS % ("read", "ok"): f"0+{reads}x20"}


def spare(rows: int, of: int) -> dict[str, str]:
    limit = 'npu_gr_limit{instance="a",name="spare_item_rows"}'
    return {'npu_gr_spare_item_rows{instance="a"}': f"{rows}x9", limit: f"{of}x9"}


def missed(num: int, of: int) -> dict[str, str]:
    name = 'npu_gr_match_%s_items_total{index="match",instance="a"}'
    return {name % "missed": f"0+{num}x50", name % "checked": f"0+{of}x50"}


def deltas(one: int, other: int) -> dict[str, str]:
    name = 'npu_gr_delta_sequence{instance="%s"}'
    return {name % "a": f"{one}x9", name % "b": f"{other}x9"}


def of_users(num: int, fetched: int) -> dict[str, str]:
    return {USERS % "nothing": f"0+{num}x20", USERS % "source": f"0+{fetched}x20"}


def one(
    alert: str, fires: dict[str, str], quiet: dict[str, str], minute: int, **labels: str
) -> list[Case]:
    return [Case(fires, minute, {alert: labels}, []), Case(quiet, minute, {}, [alert])]


def together(cases: Iterable[Case]) -> Case:
    """Several that do not touch each other as one: promtool evaluates every rule in each."""
    cases = list(cases)
    return Case(
        {name: values for case in cases for name, values in case.series.items()},
        cases[0].minute,
        {alert: labels for case in cases for alert, labels in case.fires.items()},
        [alert for case in cases for alert in case.quiet],
    )


BURNS: list[Case] = [
    together(same)
    for promise in Promise
    for same in zip(*(burning(objective.kind, promise) for objective in OBJECTIVES), strict=True)
]
PENDING = 'npu_gr_erasure_pending_seconds{instance="a",place="store"}'
CAUSES: list[Case] = [
    *one("NpuGrInstanceDown", {UP: "0x5"}, {UP: "1 0 1 0 1 0"}, 4, instance="a", job="npu_gr"),
    *one(
        "NpuGrInstanceDown",
        {OF_OPERATOR: "0x5"},
        {OF_OPERATOR: "1 0 1 0 1 0"},
        4,
        instance="a",
        job="shop/npu-gr",
    ),
    # no series at all, or those of another job
    *one("NpuGrSeriesMissing", {UP.replace("npu_gr", "shop"): "1x20"}, {UP: "1x20"}, 10),
    *one("NpuGrSeriesMissing", {KEYS: "1x20"}, {OF_OPERATOR: "1x20"}, 10),
    *one(
        "NpuGrSeriesMissing",
        {UP: "1x90", ROUTER_UP: "1x60 _x30"},
        {UP: "1x90", ROUTER_UP: "1x90"},
        75,
        job="npu_gr_router",
    ),
    # of two one is gone; a pod has another name after an update
    *one(
        "NpuGrTargetGone",
        {UP: "1x90", OTHER_UP: "1x60 _x30"},
        {UP: "1x60 _x30", OTHER_UP: "_x60 1x30"},
        80,
        job="npu_gr",
    ),
    *one(
        "NpuGrRecordingFailing",
        {RECORDED % "dropped": "0+3x20", RECORDED % "written": "0+97x20"},
        {RECORDED % "dropped": "0+1x20", RECORDED % "written": "0+199x20"},
        18,
        **INSTANCE,
    ),
    *one(
        "NpuGrRecorderOff",
        {RECORDER_ON % "true": "0x40"},
        {RECORDER_ON % "true": "1x20 0x20"},
        35,
        instance="a",
        enabled="true",
    ),
    *one(
        "NpuGrRecorderOff",
        {RECORDER_ON % "true": "0x40"},
        {RECORDER_ON % "false": "0x40"},
        35,
        instance="a",
        enabled="true",
    ),
    *one("NpuGrNothingRecorded", unrecorded(0), unrecorded(1), 85, **INSTANCE),
    # nobody asks, or nobody wants a recording
    Case({**unrecorded(0), ASKED: "0+1x90"}, 85, {}, ["NpuGrNothingRecorded"]),
    Case({**unrecorded(0), RECORDER_ON % "true": "0x90"}, 28, {}, ["NpuGrNothingRecorded"]),
    *one("NpuGrInstanceNotReady", {READY: "0x9"}, {READY: "0x3 1x5"}, 8, **INSTANCE),
    *one("NpuGrScoresDrift", {FAILURES: "0 0 1 1 1 1"}, {FAILURES: "1x5"}, 5, **INSTANCE),
    *one("NpuGrDevicePassHangs", stuck("device_0", 1), stuck("device_0", 0), 3, **DEVICE),
    *one("NpuGrWorkLate", stuck("recorder", 1), stuck("device_0", 1), 4, **RECORDER),
    *one("NpuGrPrefixCacheOff", {SWITCHED: "0 0 1x3"}, {SWITCHED: "0x5"}, 4, **INSTANCE),
    *one(
        "NpuGrModelRolledBack",
        {ROLLED_BACK: "0 0 1x3"},
        {ROLLED_BACK: "0x5"},
        4,
        instance="a",
        reason="items",
    ),
    *one("NpuGrTierOverBudget", held(60, 41), held(60, 40), 5, instance="a", tier="hbm"),
    *one(
        "NpuGrBackendFallbacks",
        {f'{FALLBACKS}{{instance="a",op="hstu_attention"}}': "0+1x30"},
        {f'{FALLBACKS}{{instance="a",op="graphs"}}': "0+1x30"},
        25,
        instance="a",
        op="hstu_attention",
    ),
    *one("NpuGrOverload", shed(3, 97), shed(1, 199), 15, **INSTANCE),
    *one("NpuGrPrefixesWasted", wasted(4, 10), wasted(2, 10), 65, **INSTANCE),
    Case(wasted(4, 0), 65, {}, ["NpuGrPrefixesWasted"]),
    Case({**wasted(4, 1), COPIED_BACK: "0+20x70"}, 65, {}, ["NpuGrPrefixesWasted"]),
    *one(
        "NpuGrRelayErrors",
        {ERRORS: "0+12x30"},
        {ERRORS: "0+3x30"},
        25,
        instance="a",
        where="reload",
    ),
    *one(
        "NpuGrReloadRejected",
        {RELOAD: "1 0 0 0"},
        {RELOAD: "1 0 1 1"},
        3,
        instance="a",
        what="configuration",
    ),
    *one(
        "NpuGrRedisUnreachable",
        {BREAKER % "redis": "1x9"},
        {BREAKER % "redis": "0 0 0 0 0 1 0 0 0 0"},
        6,
        **INSTANCE,
    ),
    *one(
        "NpuGrStoreBreakerOpen",
        {BREAKER % "embedded": "1x9"},
        {BREAKER % "embedded": "0 0 0 0 0 1 0 0 0 0"},
        6,
        instance="a",
        lane="writes",
    ),
    *one(
        "NpuGrStoreFailing",
        calls("read", "store_slow", 3, 97),
        calls("read", "store_slow", 1, 199),
        15,
        **INSTANCE,
    ),
    Case(
        calls("read", "entry_corrupt", 3, 97),
        15,
        {"NpuGrStoreCorrupt": INSTANCE},
        ["NpuGrStoreFailing"],
    ),
    *one(
        "NpuGrStoreDiskFull",
        calls("append", "disk_full", 1, 999),
        calls("append", "disk_full", 0, 9),
        9,
        **INSTANCE,
    ),
    *one("NpuGrStoreDiskNearlyFull", disk(9), disk(10), 8, **INSTANCE),
    *one(
        "NpuGrStoreCorrupt",
        {'npu_gr_store_damaged_places{instance="a"}': "2x5"},
        {'npu_gr_store_damaged_places{instance="a"}': "0x5"},
        3,
        **INSTANCE,
    ),
    *one(
        "NpuGrErasureUnfinished",
        {PENDING: "30000x40"},
        {PENDING: "20000x40"},
        25,
        instance="a",
        place="store",
    ),
    *one("NpuGrFeatureSourceFailing", of_users(3, 100), of_users(1, 200), 15, **INSTANCE),
    *one("NpuGrHistoryDegraded", degraded(3, 100), degraded(1, 200), 15, **INSTANCE),
    *one("NpuGrEventLoopBlocked", lag(95, 5), lag(995, 5), 25, **INSTANCE),
    *one("NpuGrEventLoopBlocked", froze(1), froze(0), 25, **INSTANCE),
    *one("NpuGrLogLinesDropped", dropped(1), dropped(0), 25, **STDOUT),
    *one("NpuGrApiKeysFileStale", {STALE: "1x9"}, {STALE: "0 1 0 0 0 0 0 0 0 0"}, 8, **INSTANCE),
    *one(
        "NpuGrNoApiKeys",
        {KEYS: "0x20", WRONG: "0+9x20"},
        {KEYS: "0x20", WRONG: "0x20"},
        15,
        **INSTANCE,
    ),
    Case({KEYS: "1x20", WRONG: "0+9x20"}, 15, {}, ["NpuGrNoApiKeys"]),
    # Prometheus' tests begin in 1970
    *one(
        "NpuGrCertificateExpires",
        {EXPIRES: "1209000x70"},
        {EXPIRES: "1300000x70"},
        65,
        instance="a",
        of="server",
    ),
    *one("NpuGrCatalogueOld", {AGE: "700000x70"}, {AGE: "600000x70"}, 65, **INSTANCE),
    *one("NpuGrDeltasDiffer", deltas(4, 3), deltas(4, 4), 8),
    *one("NpuGrSpareItemRowsLow", spare(12, 64), spare(13, 64), 8, **INSTANCE),
    *one("NpuGrMatchRecallLow", missed(2, 100), missed(1, 101), 45, index="match", **INSTANCE),
    Case(missed(2, 4), 45, {}, ["NpuGrMatchRecallLow"]),  # too few to tell
    # a ranker without row dropout has none
    Case(spare(0, 0), 8, {}, ["NpuGrSpareItemRowsLow"]),
]


ACTIVE = 'haproxy_backend_active_servers{instance="r",proxy="users"}'
ANSWERS = 'haproxy_frontend_http_responses_total{instance="r",proxy="npu_gr",code="%s"}'
OPEN = 'haproxy_process_current_connections{instance="r"}'
MOST = 'haproxy_process_max_connections{instance="r"}'
DOWN = 'haproxy_server_status{instance="r",proxy="users",server="gr-1",state="DOWN"}'
BEHIND = 'haproxy_backend_http_responses_total{instance="r",proxy="users",code="%s"}'
AGAIN = 'haproxy_backend_retry_warnings_total{instance="r",proxy="users"}'
ASKED = 'haproxy_backend_http_requests_total{instance="r",proxy="users"}'
UNTAKEN = 'haproxy_backend_connection_errors_total{instance="r",proxy="users"}'
QUEUED = 'haproxy_backend_queue_time_average_seconds{instance="r",proxy="users"}'
IDLE = 'haproxy_process_idle_time_percent{instance="r"}'
LOST = 'haproxy_process_dropped_logs_total{instance="r"}'
ROUTER = {"instance": "r"}
USERS_OF_ROUTER = {"instance": "r", "proxy": "users"}
OF_SERVER = {**USERS_OF_ROUTER, "server": "gr-1", "state": "DOWN"}


def routed(good: int, failed: int) -> dict[str, str]:
    return {ANSWERS % "2xx": f"0+{good}x30", ANSWERS % "5xx": f"0+{failed}x30"}


def again(num: int) -> dict[str, str]:
    return {AGAIN: f"0+{num}x30", ASKED: "0+100x30"}


CAUSES += [
    *one(
        "NpuGrRouterDown",
        {ROUTER_UP: "0x5"},
        {ROUTER_UP: "1 0 1 0 1 0"},
        4,
        instance="r",
        job="npu_gr_router",
    ),
    *one("NpuGrRouterNoInstance", {ACTIVE: "0x5"}, {ACTIVE: "0 1 0 1 0 1"}, 4, **USERS_OF_ROUTER),
    *one("NpuGrRouterErrors", routed(97, 3), routed(995, 5), 15, **ROUTER),
    # rare requests, next to the probes of a balancer
    *one(
        "NpuGrRouterErrors",
        {BEHIND % "5xx": HOURLY, BEHIND % "2xx": "0x420", ANSWERS % "2xx": "0+600x420"},
        {BEHIND % "5xx": "0x200 1x220", BEHIND % "2xx": HOURLY, ANSWERS % "2xx": "0+600x420"},
        365,
        **ROUTER,
    ),
    *one(
        "NpuGrRouterConnectionsFull",
        {OPEN: "95x5", MOST: "100x5"},
        {OPEN: "80x5", MOST: "100x5"},
        4,
        **ROUTER,
    ),
    *one("NpuGrRouterInstanceOut", {DOWN: "1x5"}, {DOWN: "1 0 1 0 1 0"}, 4, **OF_SERVER),
    *one("NpuGrRouterSecondTries", again(6), again(4), 25, **ROUTER),
    *one(
        "NpuGrRouterRejects",
        {UNTAKEN: "0+3x20", ASKED: "0+100x20"},
        {UNTAKEN: "0+1x20", ASKED: "0+200x20"},
        15,
        **ROUTER,
    ),
    *one("NpuGrRouterSlow", {QUEUED: "0.02x30"}, {QUEUED: "0.005x30"}, 25, **USERS_OF_ROUTER),
    *one("NpuGrRouterBusy", {IDLE: "10x30"}, {IDLE: "30x30"}, 25, **ROUTER),
    *one("NpuGrRouterLogLinesDropped", {LOST: "0+1x30"}, {LOST: "0x30"}, 25, **ROUTER),
]


def as_test(case: Case) -> dict[str, Any]:
    expected = [
        {
            "eval_time": f"{case.minute}m",
            "alertname": alert,
            "exp_alerts": [
                {
                    "exp_labels": {**labels, **ALERTS[alert]["labels"]},
                    "exp_annotations": {
                        name: text.replace("{{ $labels.instance }}", labels.get("instance", "a"))
                        .replace("{{ $labels.job }}", labels.get("job", ""))
                        .replace("{{ $labels.server }}", "gr-1")
                        .replace("{{ $labels.tier }}", "hbm")
                        .replace("{{ $labels.where }}", "reload")
                        .replace("{{ $labels.what }}", "configuration")
                        .replace("{{ $labels.lane }}", "writes")
                        .replace("{{ $labels.of }}", "server")
                        .replace("{{ $labels.place }}", "store")
                        .replace("{{ $labels.reason }}", labels.get("reason", ""))
                        .replace("{{ $labels.stream }}", "stdout")
                        .replace("{{ $labels.worker }}", labels.get("worker", ""))
                        for name, text in ALERTS[alert]["annotations"].items()
                    },
                }
            ],
        }
        for alert, labels in case.fires.items()
    ]
    expected += [
        {"eval_time": f"{case.minute}m", "alertname": alert, "exp_alerts": []}
        for alert in case.quiet
    ]
    series = [{"series": name, "values": values} for name, values in case.series.items()]
    return {"interval": "1m", "input_series": series, "alert_rule_test": expected}


def promtool(*words: str, stdin: bytes | None = None) -> subprocess.CompletedProcess[bytes]:
    if shutil.which("promtool") is None:
        pytest.skip("needs promtool (Debian: prometheus)")
    return subprocess.run(["promtool", *words], input=stdin, capture_output=True, timeout=120)


def test_every_alert_has_a_case_that_fires_and_one_that_does_not() -> None:
    assert {alert for case in (*BURNS, *CAUSES) for alert in case.fires} == ALERTS.keys()
    assert {alert for case in (*BURNS, *CAUSES) for alert in case.quiet} == ALERTS.keys()


@pytest.mark.prometheus
@pytest.mark.parametrize("about", ["burns", "rare", "causes"])
def test_every_alert_fires_when_it_should(tmp_path: Path, about: str) -> None:
    *burns, causes = RULES["groups"]
    cases, groups, every = {
        "burns": ([case for case in BURNS if case.minute != RARE_MINUTE], burns, "5m"),
        # rules that look back for hours need no evaluation in between
        "rare": ([case for case in BURNS if case.minute == RARE_MINUTE], burns, "73m"),
        "causes": (CAUSES, [causes], "1m"),
    }[about]
    (tmp_path / "rules.yml").write_text(yaml.safe_dump({"groups": groups}))
    tests = {
        "rule_files": ["rules.yml"],
        "evaluation_interval": every,
        "group_eval_order": [group["name"] for group in groups],  # else at random
        "tests": [as_test(case) for case in cases],
    }
    (tmp_path / "tests.yml").write_text(yaml.safe_dump(tests))
    done = promtool("test", "rules", str(tmp_path / "tests.yml"))
    assert done.returncode == 0, (done.stdout + done.stderr).decode()[-4000:]


@pytest.mark.prometheus
def test_the_recorded_figures_are_those_by_hand(tmp_path: Path) -> None:
    """950 good, 30 slow and 20 failed a minute.

    Whole numbers, for promtool compares floats exactly.
    """
    (tmp_path / "rules.yml").write_text(yaml.safe_dump(RULES))
    series = [
        {
            "series": f'npu_gr_slo_requests_total{{kind="rank",result="{result}"}}',
            "values": f"0+{count}x120",
        }
        for result, count in (("good", 950), ("slow", 30), ("failed", 20))
    ]
    late, lost = 30 / 980, 20 / 1000
    wanted = {
        'slo:sli_error:ratio_rate5m{sloth_slo="rank-latency"}': late,
        'slo:sli_error:ratio_rate1h{sloth_slo="rank-availability"}': lost,
        'slo:current_burn_rate:ratio{sloth_slo="rank-latency"}': late / 0.01,
        'slo:current_burn_rate:ratio{sloth_slo="rank-availability"}': lost / 0.001,
        'slo:period_error_budget_remaining:ratio{sloth_slo="rank-latency"}': 1 - late / 0.01,
        'slo:objective:ratio{sloth_slo="rank-latency"}': 0.99,
        'slo:time_period:days{sloth_slo="rank-latency"}': 30,
        "count(slo:sli_error:ratio_rate5m)": 2,  # a kind without requests has none
        'sloth_slo_info{sloth_id="npu_gr-rank-latency"}': 1,
    }
    exprs = [
        {
            "expr": f"round(sum({expr}) * 1000)",
            "eval_time": "100m",
            "exp_samples": [{"labels": "{}", "value": round(value * 1000)}],
        }
        for expr, value in wanted.items()
    ]
    tests = [{"interval": "1m", "input_series": series, "promql_expr_test": exprs}]
    (tmp_path / "tests.yml").write_text(
        yaml.safe_dump({"rule_files": ["rules.yml"], "tests": tests})
    )
    done = promtool("test", "rules", str(tmp_path / "tests.yml"))
    assert done.returncode == 0, (done.stdout + done.stderr).decode()[-4000:]


@pytest.mark.prometheus
def test_the_files_are_valid() -> None:
    done = promtool("check", "rules", str(ROOT / "dashboards" / "rules.yml"))
    assert done.returncode == 0, done.stderr.decode()
    done = promtool("check", "config", str(ROOT / "dashboards" / "prometheus.yml"))
    assert done.returncode == 0, done.stderr.decode()


@pytest.mark.parametrize("alert", ALERTS)
def test_every_alert_has_its_runbook(alert: str) -> None:
    page = (ROOT / ALERTS[alert]["annotations"]["runbook_url"]).read_text()
    assert f"`{alert}`" in page
    for heading in ("## Meaning", "## Check", "## Do"):
        assert heading in page
