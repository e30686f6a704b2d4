"""What ranks do together: process groups, failure of a peer, synchronised dense layers."""

from pibroch.collectives.ranks import Channel, Ranks

__all__ = ["Channel", "Ranks"]
