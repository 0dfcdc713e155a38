"""Which documents of a dataset are for training, validation and test: `--split`."""

from __future__ import annotations

from megatron.errors import ConfigError


def parse_split(text: str) -> tuple[float, float, float]:
    """Shares of training, validation and test, adding up to one, from "969, 30, 1".

    Numbers are separated by "," or "/"; missing ones are zero.

    Raises:
        ConfigError: not one to three non-negative numbers with a positive sum.
    """
    parts = text.split("," if "," in text else "/")
    try:
        shares = [float(part) for part in parts]
    except ValueError:
        shares = []
    total = sum(shares)
    valid = 1 <= len(shares) <= 3 and min(shares) >= 0 and 0 < total < float("inf")
    if not valid:
        raise ConfigError(
            f"--split {text!r} is not one to three numbers, none negative and one above zero: "
            'write the shares of training, validation and test, for example "969, 30, 1"'
        )
    train, valid_share, test = (*(share / total for share in shares), 0.0, 0.0)[:3]
    return train, valid_share, test


def split_bounds(text: str, num_documents: int) -> tuple[int, int, int, int]:
    """Document bounds: training is `[b0, b1)`, validation `[b1, b2)`, test `[b2, b3)`.

    Each share is rounded to whole documents (halves to even); what that is too many or too few in
    all is then taken from every bound but the first, as Megatron does.

    Raises:
        ConfigError: see `parse_split`.
    """
    bounds = [0]
    for share in parse_split(text):
        bounds.append(bounds[-1] + round(share * float(num_documents)))
    surplus = bounds[-1] - num_documents
    # A bound cannot leave [0, num_documents], where rounding and a zero share would push it.
    _, first, second, last = (max(0, min(bound - surplus, num_documents)) for bound in bounds)
    return 0, first, second, last
