"""Every route of the application has a rule, and every rule a route.

What changes the instance is not public.
"""

from __future__ import annotations

from npu_gr.core.kinds import KINDS, Scope
from npu_gr.server.auth.rules import rules
from tests.server.examples import EXAMPLES
from tests.server.fake import FakeService, metrics_of_all_kinds


async def test_routes_and_rules_are_the_same() -> None:
    from npu_gr.server.config import ServerConfig
    from npu_gr.server.routes import build_web_app

    service = FakeService({name: example.answer for name, example in EXAMPLES.items()})
    app = build_web_app(service, ServerConfig(), metrics_of_all_kinds())
    found = {
        (route.method, route.resource.canonical)
        for route in app.router.routes()
        if route.resource is not None and route.method != "HEAD"
    }
    # added where something can be recorded
    record = {key for key in rules() if key[1] == "/debug/record"}
    assert found | record == set(rules())


def test_what_is_public_changes_no_instance() -> None:
    kinds = {(kind.method, path) for kind in KINDS.values() for path in kind.paths}
    for (method, path), rule in rules().items():
        if rule.is_public and (method, path) not in kinds:
            assert method == "GET"
            assert rule.scope in (
                (Scope.OBSERVE,) if path.endswith("/stats") else (None, Scope.INFER)
            )
        assert rule.is_public or rule.is_admin
