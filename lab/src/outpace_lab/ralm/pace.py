"""The speculation stride: how many blocks to guess before asking the knowledge base, from measured times.

OS3, the optimal speculation stride scheduler of RaLMSpec (Zhang et al. 2024, section 3.3): choose the stride
with the highest expected progress per second. Differences from the paper: a round always queries one block
more than it has speculated, so a stride of s makes 1 to s + 1 blocks of progress, and 0 is allowed; the
search time may grow with the number of queries; the hit rate starts at one half instead of being capped.
"""

from __future__ import annotations

from dataclasses import dataclass, field

_FORGET = 0.8  # decay of a measurement per round: a window of about five rounds, as in the paper
_FIRST = 1  # the stride until there are measurements, as in the paper


@dataclass
class _Line:
    """A least-squares fit y = fixed + slope x with exponential decay, both coefficients at least 0."""

    weight: float = 0.0
    x: float = 0.0
    y: float = 0.0
    xx: float = 0.0
    xy: float = 0.0

    def add(self, x: float, y: float) -> None:
        for name, value in (("weight", 1.0), ("x", x), ("y", y), ("xx", x * x), ("xy", x * y)):
            setattr(self, name, _FORGET * getattr(self, name) + value)

    def seconds_at(self, x: float) -> float:
        """Expected seconds; 0 if nothing was measured."""
        if not self.weight:
            return 0.0
        spread = self.xx * self.weight - self.x * self.x
        slope = 0.0
        # If only one x was measured, the time is assumed to be the same for all, as in the paper.
        if spread > 1e-6 * self.xx * self.weight:
            slope = (self.xy * self.weight - self.x * self.y) / spread
        slope = min(max(slope, 0.0), self.y / self.x)
        return (self.y - slope * self.x) / self.weight + slope * x


@dataclass
class Pace:
    """The policy that chooses the stride of a request's next round.

    Attributes:
        most: the maximum stride.
        asynchronous: whether a block is decoded while the knowledge base searches.
    """

    most: int
    asynchronous: bool
    _hits: float = 1.0
    _misses: float = 1.0
    _decode: _Line = field(default_factory=_Line)
    _search: _Line = field(default_factory=_Line)

    def decoded(self, seconds: float) -> None:
        """Record the seconds that decoding one block took."""
        self._decode.add(1, seconds)

    def searched(self, queries: int, seconds: float) -> None:
        """Record the seconds that a search with this many queries took."""
        self._search.add(queries, seconds)

    def guessed(self, hits: int, misses: int) -> None:
        """Record how many guesses of a round, up to the first wrong one, were right and wrong."""
        self._hits = _FORGET * self._hits + hits
        self._misses = _FORGET * self._misses + misses

    @property
    def hit_rate(self) -> float:
        return self._hits / (self._hits + self._misses)

    def rate(self, stride: int) -> float:
        """Expected blocks per second of a round that speculates ``stride`` blocks.

        Every guess has the same probability of being right. The block after the last right one is progress as
        well; it takes a block's time, or, if decoded during the search, only when it was guessed wrong.
        """
        right = self.hit_rate
        blocks = sum(right**guesses for guesses in range(stride + 1))
        decode, search = self._decode.seconds_at(1), self._search.seconds_at(stride + 1)
        if self.asynchronous:
            seconds = stride * decode + max(decode, search) + (1 - right ** (stride + 1)) * decode
        else:
            seconds = stride * decode + search + decode
        return blocks / seconds

    def stride(self) -> int:
        """The stride with the highest rate; the lowest in a tie."""
        if not (self._decode.seconds_at(1) > 0 and self._search.weight):
            return min(_FIRST, self.most)
        return max(range(self.most + 1), key=self.rate)
