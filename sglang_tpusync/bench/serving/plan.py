"""What one run measures, and the sizes of the servers that follow from it."""

from __future__ import annotations

from typing import Literal

import msgspec

from sglang_tpusync.errors import ConfigError

__all__ = ["Backend", "Plan"]

Backend = Literal["none", "tpusync", "file"]

_PUSH_TOKENS_MAX = 2048
_CONTEXT_TOKENS = {"long-llama": 65536, "smollm2": 8192}


class Plan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The run. Immutable. `validate` raises ConfigError naming the option, its value and what is allowed."""

    model: str = "long-llama"
    prompt_tokens: tuple[int, ...] = (2048, 8192, 16384)
    num_rounds: int = 5
    output_tokens: int = 16
    seed: int = 0
    backends: tuple[Backend, ...] = ("tpusync",)
    page_tokens: int = 64
    tp_size: int = 1
    omp_threads: int | None = None  # of each rank; None: the cores of this process, shared out
    tolerance: float = 0.0  # of a log probability; 0: bit-equal
    control: bool = True  # tamper with one stored prefix: the check must notice
    restart_goal: float | None = None  # most that the first token after a restart may cost, relative to a cold one

    def validate(self) -> Plan:
        context_tokens = _CONTEXT_TOKENS.get(self.model, 1 << 20)
        longest = context_tokens - self.output_tokens - 1
        if not self.prompt_tokens:
            raise ConfigError("--prompt-tokens: at least one length is needed")
        for length in self.prompt_tokens:
            shortest = 8 * self.page_tokens
            if not shortest <= length <= longest:
                raise ConfigError(f"--prompt-tokens {length}: allowed are {shortest} to {longest} with {self.model}")
        if self.num_rounds < 1:
            raise ConfigError(f"--rounds {self.num_rounds}: at least 1")
        if self.tolerance < 0:
            raise ConfigError(f"--tolerance {self.tolerance}: at least 0")
        return self

    @property
    def longest(self) -> int:
        return max(self.prompt_tokens)

    @property
    def device_tokens(self) -> int:
        """Room of the device pool: one longest prompt, its answer and a fifth, so that two cannot be there at once."""
        return self._whole_pages(self.longest + self.output_tokens + self.longest // 5)

    @property
    def push_tokens(self) -> tuple[int, ...]:
        """Lengths of the prompts that, asked one after the other, leave nothing older in the device pool.

        Short ones, since the first time they are computed and attention is quadratic.
        """
        length = min(self.longest, _PUSH_TOKENS_MAX)
        return (length,) * -(-self.device_tokens // length)

    @property
    def host_ratio(self) -> float:
        """Host tokens per device token: a round's prompts and those that push must be in host DRAM together."""
        needed = sum(self.prompt_tokens) + sum(self.push_tokens) + self.longest
        return max(2.0, round(needed * 1.25 / self.device_tokens, 1))

    @property
    def stored_tokens(self) -> int:
        """Tokens whose KV a whole run leaves in the store of one backend."""
        return self.num_rounds * sum(self.prompt_tokens) + sum(self.push_tokens) + self.control_tokens

    @property
    def control_tokens(self) -> int:
        return min(self.prompt_tokens)

    def _whole_pages(self, tokens: int) -> int:
        return -(-tokens // self.page_tokens) * self.page_tokens
