"""Dense FFNs of one layer, cut on demand: from memory (tests, verify)."""

from dataclasses import dataclass

from moesaic.upcycling.experts import ExpertWeights
from moesaic.upcycling.method import Shard


@dataclass(frozen=True, kw_only=True)
class MemorySources:
    """FFNs that are in memory anyway: `ffns[0]` is the base's, `ffns[1 + i]` specialist i's."""

    ffns: tuple[ExpertWeights, ...]
    shards: int
    """M."""

    def shard(self, shard: Shard) -> ExpertWeights:
        """The shard; it shares memory with the whole FFN."""
        return self.ffns[shard.source].slice(shard.number, self.shards)
