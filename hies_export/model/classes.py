"""Read how a model's config names its classes: `id2label` decides, as in the pipelines of transformers."""

from __future__ import annotations

import logging
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import RequestError, listed, quoted

logger = logging.getLogger(__name__)


# How names of classes say which word of an entity they are for, and its type: B-PER, b_per, PER-B, or a letter alone.
# The letters are those of IOB (B for the first word, I for others), IOBES and BILOU (E or L for the last, S or U for an
# only one), BMES and BMEWO (M for others, W for an only one).
_PLACED = [
    re.compile(rf"{before}(?P<place>[BIMELSUW]){after}", re.IGNORECASE)
    for before, after in (("", "-(?P<type>.+)"), ("", "_(?P<type>.+)"), ("(?P<type>.+)[-_]", ""), ("", "(?P<type>)"))
]


def places_in_entities(names: Sequence[str]) -> list[tuple[str, str]]:
    """Return of each class of words the letter of its place in an entity, and the type of the entity.

    The letter is one of `BIMELSUW`, and S for a name without one, whose words are entities by themselves. Of `O`, both
    are empty. Of letters alone, the type is `_`, as in seqeval.
    """
    outside = [name.upper() == "O" for name in names]
    for number, pattern in enumerate(_PLACED):
        found = [pattern.fullmatch(name) for name in names]
        whole = number < 2 or all(match or out for match, out in zip(found, outside, strict=True))
        # Without words that begin or go on, a letter is a part of a name.
        if whole and {match["place"].upper() for match in found if match} & set("BIM"):
            break
    else:
        found = [None] * len(names)
    return [
        ("", "") if out else (match["place"].upper(), match["type"] or "_") if match else ("S", name)
        for name, match, out in zip(names, found, outside, strict=True)
    ]


def check_id2label(id2label: Any) -> None:
    """Raise a ValueError if an `id2label` does not map integers to anything; transformers cannot read others."""
    try:
        if not isinstance(id2label, Mapping):
            raise ValueError
        list(map(int, id2label))
    except (TypeError, ValueError):
        raise ValueError(
            f'id2label must map the number of each class to its name, such as {{"0": "bad", "1": "good"}}, got '
            f"{quoted(id2label)}"
        ) from None


class ClassNames:
    """The names of a classifier's classes, by number, and the numbers of a name.

    Raises:
        RequestError: `id2label` does not name every class, numbered from 0.
    """

    def __init__(self, config: Any) -> None:
        try:
            check_id2label(config.id2label)
        except ValueError as error:
            raise RequestError(str(error)) from None
        named = {int(number): name for number, name in config.id2label.items()}
        if not named or sorted(named) != list(range(len(config.id2label))):
            raise RequestError(
                f"id2label must name every class, numbered from 0 without a gap, but it has {quoted(config.id2label)}; "
                "name the classes in the model's config as it was trained"
            )
        for number, name in named.items():
            if not isinstance(name, (str, int, float)):
                raise RequestError(f"id2label must give each class a name, got {quoted(name)} for class {number}")
        self.names = [str(named[number]) for number in range(len(named))]
        self._exact, self._folded = defaultdict[str, list[int]](list), defaultdict[str, list[int]](list)
        for number, name in enumerate(self.names):
            self._exact[name].append(number)
            self._folded[name.casefold()].append(number)

    def __str__(self) -> str:
        return listed(self.names)

    @property
    def are_default(self) -> bool:
        """Whether the names are those of transformers for classes without a name: LABEL_0 and so on."""
        return all(name.casefold().startswith("label_") for name in self.names)

    @property
    def are_numbers(self) -> bool:
        """Whether all names are whole numbers, such as those of ratings."""
        return all(name.isdecimal() for name in self.names)

    def find(self, name: str) -> list[int]:
        """Return the numbers of the classes with a name: exactly this, or else but for the case; none if unknown."""
        return self._exact.get(name) or self._folded.get(name.casefold(), [])

    def warn_of_label2id(self, label2id: Any) -> None:
        """Warn if `label2id`, which nothing reads here, is not the inverse of `id2label`."""
        given = label2id if isinstance(label2id, Mapping) else {}
        # Numbers may be text or floats, as JSON and pandas write them.
        wrong = [
            f"{number} for {quoted(name)}"
            for name, number in given.items()
            if str(number).removesuffix(".0") not in map(str, self.find(str(name)))
        ]
        missing = {name.casefold() for name in self.names} - {str(name).casefold() for name in given}
        if wrong or missing:
            logger.warning(
                "label2id of the model's config %s; classes have the names of id2label, as in pipelines: %s",
                f"contradicts its id2label, with {listed(wrong, most=3)}" if wrong else "is missing or lacks classes",
                listed((f"{number} is {name}" for number, name in enumerate(self.names)), most=5),
            )
