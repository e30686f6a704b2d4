"""What ranks do together: process groups, failure of a peer, synchronised dense layers."""

from pibroch.collectives.channel import Channel
from pibroch.collectives.data_parallel import data_parallel
from pibroch.collectives.ranks import Ranks
from pibroch.collectives.topology import Topology

__all__ = ["Channel", "Ranks", "Topology", "data_parallel"]
