"""The rank double under the name that tests use; it lives beside the commands that run simulated worlds."""

from tools.worlds.rank_double import FULL_ONLY, UNIT_BYTES, RankDouble, Shape, geometry, next_token

__all__ = ["FULL_ONLY", "UNIT_BYTES", "RankDouble", "Shape", "geometry", "next_token"]
