"""Features of users from Feast's online store (`FeatureStore.get_online_features`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from npu_gr.core.errors import ConfigError
from npu_gr.core.history import UserKey


class FeastSource:
    """Reads one row of an online store a call. Any thread may call.

    Source: Feast's Python SDK, https://docs.feast.dev; `get_online_features` blocks, so threads call it.
    """

    def __init__(
        self,
        repo: str,
        features: Mapping[str, str],
        user_key: str = "user_id",
        tenant_key: str = "",
        user_is_number: bool = False,
    ) -> None:
        """Open the store of a repository.

        Args:
            repo: folder with `feature_store.yaml`.
            features: name of the model's feature -> `VIEW:FEATURE` of Feast. Those of the model that are not here are
                missing.
            user_key: join key of the entity.
            tenant_key: join key of the tenant; "" = the entity has none.
            user_is_number: the join key is an integer; a user whose name is none has no features.

        Raises:
            ConfigError: the package is missing, or the repository cannot be opened.
        """
        if bad := [ref for ref in features.values() if len(ref.split(":")) != 2]:
            raise ConfigError(f"features.source.options.features: {bad[0]!r} is no VIEW:FEATURE")
        try:
            from feast import FeatureStore
        except ImportError as error:
            raise ConfigError("features.source.entry: feast needs pip install 'npu_gr[feast]'") from error
        try:
            self._store: Any = FeatureStore(repo_path=repo)
        except Exception as error:  # Feast's own, of any kind
            raise ConfigError(f"features.source.options.repo: {repo}: {type(error).__name__}: {error}") from error
        self._refs = dict(features)
        self._user_key = user_key
        self._tenant_key = tenant_key
        self._user_is_number = user_is_number

    def fetch(self, user: UserKey, names: Sequence[str], timeout_s: float) -> Mapping[str, Any]:
        """Read the newest values of a user; Feast has time limits of its own, so `timeout_s` is not used."""
        refs = {name: self._refs[name] for name in names if name in self._refs}
        if not refs or (self._user_is_number and not user.user.isdecimal()):
            return {}
        row: dict[str, Any] = {self._user_key: int(user.user) if self._user_is_number else user.user}
        if self._tenant_key:
            row[self._tenant_key] = user.tenant
        answer = self._store.get_online_features(
            features=list(refs.values()), entity_rows=[row], full_feature_names=True
        ).to_dict()
        # two views may have features of one name: so the answer has them as `VIEW__FEATURE`
        return {name: answer[ref.replace(":", "__")][0] for name, ref in refs.items()}
