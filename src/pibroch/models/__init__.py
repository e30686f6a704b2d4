"""Models that stand on embeddings; each is a plain ``nn.Module``."""

from pibroch.models.base import Embedded, Model, MultiTaskModel
from pibroch.models.batch_norm import BatchNorm
from pibroch.models.bst import BST
from pibroch.models.build import MODELS, build_model
from pibroch.models.dcnv2 import CrossNet, DCNv2
from pibroch.models.dcnv3 import DCNv3
from pibroch.models.din import DIN
from pibroch.models.dlrm import DLRM
from pibroch.models.dropout import Dropout, set_place
from pibroch.models.finalmlp import FinalMLP
from pibroch.models.finalnet import FinalNet
from pibroch.models.flops import training_flops
from pibroch.models.gdcn import GDCN
from pibroch.models.in_batch_softmax import InBatchSoftmax
from pibroch.models.interaction import dot_interaction
from pibroch.models.linear import Linear
from pibroch.models.losses import BinaryCrossEntropy, Focal, Loss, SquaredError
from pibroch.models.masknet import MaskNet
from pibroch.models.mlp import MLP, HiddenOptions
from pibroch.models.mmoe import MMoE
from pibroch.models.ple import PLE
from pibroch.models.qnn import QNN
from pibroch.models.ranking_losses import GroupSoftmax, Pairwise, RankingLoss
from pibroch.models.sasrec import SASRec
from pibroch.models.sequences import History, SequenceModel
from pibroch.models.towers import (
    CrossTower,
    LinearTower,
    PassThrough,
    TowerDCN,
    TowerDLRM,
    TowerModel,
    TowerModule,
    Towers,
)
from pibroch.models.two_tower import TwoTower
from pibroch.models.wide import DeepFM, WideAndDeep

__all__ = [
    "BST",
    "DIN",
    "DLRM",
    "GDCN",
    "MLP",
    "MODELS",
    "PLE",
    "QNN",
    "BatchNorm",
    "BinaryCrossEntropy",
    "CrossNet",
    "CrossTower",
    "DCNv2",
    "DCNv3",
    "DeepFM",
    "Dropout",
    "Embedded",
    "FinalMLP",
    "FinalNet",
    "Focal",
    "GroupSoftmax",
    "HiddenOptions",
    "History",
    "InBatchSoftmax",
    "Linear",
    "LinearTower",
    "Loss",
    "MMoE",
    "MaskNet",
    "Model",
    "MultiTaskModel",
    "Pairwise",
    "PassThrough",
    "RankingLoss",
    "SASRec",
    "SequenceModel",
    "SquaredError",
    "TowerDCN",
    "TowerDLRM",
    "TowerModel",
    "TowerModule",
    "Towers",
    "TwoTower",
    "WideAndDeep",
    "build_model",
    "dot_interaction",
    "set_place",
    "training_flops",
]
