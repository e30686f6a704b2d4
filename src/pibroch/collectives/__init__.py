"""What ranks do together: groups, channels, failure of one, synchronised dense layers."""

from pibroch.collectives.data_parallel import clip_grad_norm, data_parallel
from pibroch.collectives.ranks import Channel, Ranks
from pibroch.collectives.topology import Topology

__all__ = ["Channel", "Ranks", "Topology", "clip_grad_norm", "data_parallel"]
