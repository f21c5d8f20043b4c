"""Bodies and answers of the admin routes of the catalogue and the vectors."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import msgspec

from npu_gr.core.errors import Unprocessable
from npu_gr.core.feature_schema.values import BLANKS
from npu_gr.core.names import FIRST_HASHED, ItemIds, served_id
from npu_gr.core.served import CatalogueChange, CatalogueInfo, NewItem, VectorsInfo
from npu_gr.server.config import ServerConfig
from npu_gr.server.schemas.fields import MOST_NAMES, Item, Items, Name, Value, optional_items

MAX_TITLE = 1024  # characters
MAX_VALUE = 256  # characters of a feature's value
MOST_VALUES = 64  # values of one feature of an item
MOST_ADDED = 10_000  # items of one change; for more, publish a file and reload
# Largest part of a change outside of its columns; it takes 30 ms to decode if it is all maps.
CHANGE_BYTES = 262_144


FeatureValue = bool | int | float | Annotated[str, msgspec.Meta(max_length=MAX_VALUE)] | None
FeatureValues = Annotated[list[FeatureValue], msgspec.Meta(max_length=MOST_VALUES)]


class NewItemBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, gc=False):
    """A new item of the catalogue, with the same fields as in its file.

    `attributes` are those of the other items; an absent one is the value of the feature of the same
    name. Without `order` the item comes last of those with its semantic ID. `features` are the item
    features that the ranker was trained on; without `sid` the semantic ID is computed from them.
    """

    item_id: Item  # its name
    title: Annotated[str, msgspec.Meta(max_length=MAX_TITLE)] = ""
    # null: computed from the features
    sid: (
        Annotated[
            list[Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]],
            msgspec.Meta(min_length=1, max_length=16),
        ]
        | None
    ) = None
    order: float | None = None
    attributes: Annotated[dict[Name, Value], msgspec.Meta(max_length=MOST_NAMES)] = {}
    features: Annotated[
        dict[Name, FeatureValue | FeatureValues], msgspec.Meta(max_length=MOST_NAMES)
    ] = {}


class RollbackBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a rollback of models serves; the body may be left out."""

    # the ranker's weights after this delta, 0 for its checkpoint's; null: the models before
    delta: Annotated[int, msgspec.Meta(ge=0, le=2**53)] | None = None


class ShadowBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A ranker that scores a share of the users' ranks next to the served one."""

    # folder of its checkpoint, on the instance's machine
    path: Annotated[str, msgspec.Meta(min_length=1, max_length=4096)]
    share: Annotated[float, msgspec.Meta(gt=0, le=1)] = 0.1


class CatalogueItemsBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Items to add, withdraw and restore, applied in this order as one atomic change."""

    add: Annotated[list[NewItemBody], msgspec.Meta(max_length=MOST_ADDED)] = []
    withdraw: Items | None = None
    restore: Items | None = None


class CatalogueOut(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The served version of the catalogue, and `previous`, to which a rollback returns.

    `sids` maps the items of a change to their computed semantic IDs, `rejected` the new items that
    it left out to the reason. `durable` says whether changes survive a restart.
    """

    version: str
    num_items: int
    num_bytes: int
    age_s: float
    previous: str | None
    durable: bool
    sids: dict[str, list[int]] = {}
    rejected: dict[str, str] = {}


class VectorsOut(msgspec.Struct, frozen=True, kw_only=True):
    """The served version of the vectors, and `previous`, to which a rollback returns."""

    version: str
    num_users: int
    num_items: int
    num_bytes: int
    age_s: float
    previous: str | None


def parse_catalogue_change(
    body: CatalogueItemsBody, config: ServerConfig, names: ItemIds
) -> CatalogueChange:
    """Convert the body of a change.

    Raises:
        TooLarge, Unprocessable: The message names the field and the limit.
    """
    return CatalogueChange(
        add=tuple(_new_item(place, new, names) for place, new in enumerate(body.add)),
        withdraw=optional_items(body.withdraw, "withdraw", config.max_history_events, names),
        restore=optional_items(body.restore, "restore", config.max_history_events, names),
    )


def _new_item(place: int, new: NewItemBody, names: ItemIds) -> NewItem:
    try:
        found = served_id(names, new.item_id)
    except ValueError as error:
        raise Unprocessable(f"add[{place}].item_id: {error}") from None
    return NewItem(
        item_id=found,
        name=str(new.item_id).strip(BLANKS) if found >= FIRST_HASHED else "",
        title=new.title,
        sid=tuple(new.sid or ()),
        order=new.order,
        attributes=new.attributes,
        features=new.features,
    )


def render_catalogue(info: CatalogueInfo) -> CatalogueOut:
    """Convert the state of the catalogue for the wire."""
    return CatalogueOut(**asdict(info))


def render_vectors(info: VectorsInfo) -> VectorsOut:
    """Convert the state of the vectors for the wire."""
    return VectorsOut(**asdict(info))
