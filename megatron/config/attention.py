"""Options of attention, under Megatron Core's names."""

from __future__ import annotations

import re
from dataclasses import dataclass

from megatron.config.fields import Need, flag
from megatron.config.patterns import read_pattern

_WINDOW = Need(lambda run: run.model.window_size, "--window-size")
_SIZES = re.compile(r"\(?([0-9]{1,9}),(-1|0)\)?")


@dataclass(frozen=True, kw_only=True)
class SelfAttentionOptions:
    """Attention.

    Attributes:
        window_size: Limit self-attention to a sliding window: 511,0 lets a token attend to itself
            and the 511 tokens before it. The second number is for encoders, and 0 or -1 here.
        window_attn_skip_freq: The layers with --window-size: a number N gives every Nth layer full
            attention and the others the window, and a pattern such as ([1]*5+[0])*4 has a 1 for
            each layer with the window. Default: all layers.
    """

    window_size: str | None = flag(None, only_for=("gpt",))
    window_attn_skip_freq: str | None = flag(None, requires=_WINDOW)

    @property
    def window(self) -> int | None:
        """The number of earlier tokens that a token in a window attends to; `None` for all.

        Raises:
            ValueError: `window_size` is not two numbers of which the second is 0 or -1.
        """
        if self.window_size is None:
            return None
        sizes = _SIZES.fullmatch("".join(self.window_size.split()))
        if sizes is None:
            raise ValueError(
                f"--window-size {self.window_size}: expected the number of earlier tokens, and 0: "
                "for example 511,0"
            )
        return int(sizes[1])


def layer_windows(options: SelfAttentionOptions, layers: int) -> tuple[int | None, ...]:
    """Return `SelfAttentionOptions.window` of each layer, `None` for one with full attention.

    Args:
        options: The flags.
        layers: The number of layers of the model.

    Raises:
        ValueError: `window_size` is no window, or `window_attn_skip_freq` neither a number nor a
            pattern of as many entries as layers. The message names the flag.
    """
    window, frequency = options.window, options.window_attn_skip_freq
    if frequency is None:
        return (window,) * layers
    text = "".join(frequency.split())
    if re.fullmatch(r"[1-9][0-9]{0,4}", text):
        limited = tuple((index + 1) % int(text) != 0 for index in range(layers))
    else:
        try:
            limited = read_pattern(text, layers)
        except ValueError as error:
            raise ValueError(f"--window-attn-skip-freq {frequency}: {error}") from None
    return tuple(window if is_limited else None for is_limited in limited)
