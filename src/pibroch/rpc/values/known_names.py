"""Names of torch that peers may use: functions, methods of tensors, classes.

A name is here because it is useful, reads and writes its arguments alone, and checks them. So there
are no functions that read files, take addresses (``cdata``), look beyond a tensor's elements
(``as_strided``, ``set_``), trust one argument about another (``segment_reduce``, pivots of
``lu_solve``, sparse constructors), return uninitialised memory, or run for a time that a number
among their arguments sets. A name stands for the function of torch, the method of tensors, and the
method in place, as far as they exist.
"""

from __future__ import annotations

# element by element, of one tensor
_ALONE = str.split("""
    abs absolute acos acosh alpha_dropout angle arccos arccosh arcsin arcsinh arctan arctanh asin
    asinh atan atanh bernoulli bitwise_not ceil celu clamp clamp_max clamp_min clip clone conj
    conj_physical cos cosh deg2rad digamma dropout erf erfc erfinv exp exp2 expm1
    feature_alpha_dropout feature_dropout fix floor frac frexp hardshrink i0 imag isfinite isinf
    isnan isneginf isposinf isreal lgamma log log10 log1p log2 logical_not logit nan_to_num neg
    negative poisson positive rad2deg real reciprocal relu resolve_conj resolve_neg round rrelu
    rsqrt selu sgn sigmoid sign signbit sin sinc sinh sqrt square tan tanh threshold trunc
    view_as_complex view_as_real
""")
# sums, orders, parts and forms of one tensor
_REDUCING = str.split("""
    adjoint all allclose amax amin aminmax any argmax argmin argsort argwhere atleast_1d atleast_2d
    atleast_3d can_cast channel_shuffle corrcoef count_nonzero cov cummax cummin cumprod cumsum
    cumulative_trapezoid detach diagonal diff equal flatten flip fliplr flipud group_norm
    instance_norm is_complex is_conj is_floating_point is_nonzero is_same_size is_signed kthvalue
    layer_norm log_softmax logcumsumexp logsumexp max mean median min mode moveaxis movedim msort
    nanmean nanmedian nanquantile nansum narrow nonzero norm numel permute pixel_shuffle
    pixel_unshuffle prod promote_types quantile ravel renorm result_type rms_norm roll rot90 select
    softmax sort squeeze std std_mean sum swapaxes swapdims t take_along_dim topk trace transpose
    trapezoid trapz tril triu unique unique_consecutive unravel_index unsqueeze var var_mean
""")
# pieces put together
_JOINING = str.split("""
    cat column_stack concat concatenate dstack gather hstack index_add index_copy index_fill
    masked_scatter masked_select row_stack scatter scatter_add scatter_reduce select_scatter
    slice_scatter diagonal_scatter stack take vstack
""")
# matrices
_MATRICES = str.split("""
    chain_matmul cholesky cholesky_inverse cholesky_solve cross det dist inverse logdet matrix_exp
    mv pairwise_distance pinverse qr slogdet svd
""")
PLAIN = (*_ALONE, *_REDUCING, *_JOINING, *_MATRICES, "from_numpy", "manual_seed")

# the result may be as large as the product of the operands
BROADCASTING = str.split("""
    add addbmm addcdiv addcmul addmm addmv addr arctan2 atan2 baddbmm bilinear bitwise_and
    bitwise_left_shift bitwise_or bitwise_right_shift bitwise_xor bmm bucketize cdist complex
    copysign cosine_similarity dot einsum eq float_power floor_divide fmax fmin fmod gcd ge ger
    greater greater_equal gt heaviside hypot index_select inner isclose isin kron ldexp le lerp less
    less_equal logaddexp logaddexp2 logical_and logical_or logical_xor lt masked_fill matmul maximum
    minimum mm mul multiply ne nextafter not_equal outer polar pow prelu remainder rsub searchsorted
    sub subtract tensordot true_divide vdot where xlogy cartesian_prod meshgrid broadcast_tensors
""")
# numbers in the arguments say how large the result is
SIZED = str.split("""
    adaptive_avg_pool1d adaptive_max_pool1d block_diag broadcast_to conv1d conv2d conv3d
    conv_transpose1d conv_transpose2d conv_transpose3d diag diag_embed diagflat expand histc
    multinomial repeat tile vander arange bartlett_window blackman_window eye full full_like
    hamming_window hann_window linspace logspace normal ones ones_like rand rand_like randint
    randint_like randn randn_like randperm tril_indices triu_indices zeros zeros_like new_full
    new_ones new_zeros
""")
# as long as windows are, it takes for each element
WINDOWS = str.split("avg_pool1d max_pool1d max_pool2d max_pool3d")
SHAPED = str.split("reshape unflatten view")
IN_PARTS = str.split("chunk dsplit hsplit split split_with_sizes tensor_split unbind vsplit")

# methods of tensors that are no functions of torch
METHODS = str.split("""
    backward bfloat16 bool broadcast_to byte cauchy_ cdouble cfloat char coalesce contiguous copy_
    cpu cuda dense_dim detach_ dim double element_size expand_as exponential_ fill_ fill_diagonal_
    float geometric_ get_device half index_put int is_coalesced is_contiguous is_shared item
    log_normal_ long ndimension nelement normal_ numpy random_ requires_grad_ reshape_as retain_grad
    short size sparse_dim storage_offset stride sum_to_size to_dense to_sparse transpose_ type_as
    unfold uniform_ values indices view_as zero_
""")
OPERATORS = str.split("""
    __abs__ __add__ __and__ __contains__ __eq__ __floordiv__ __ge__ __getitem__ __gt__ __invert__
    __le__ __len__ __lt__ __matmul__ __mod__ __mul__ __ne__ __neg__ __or__ __pow__ __radd__ __rmul__
    __rsub__ __rtruediv__ __setitem__ __sub__ __truediv__ __xor__
""")

FUNCTIONAL = str.split("""
    alpha_dropout batch_norm binary_cross_entropy binary_cross_entropy_with_logits celu
    channel_shuffle cosine_embedding_loss cosine_similarity cross_entropy dropout dropout1d
    dropout2d dropout3d elu feature_alpha_dropout gaussian_nll_loss gelu glu group_norm
    gumbel_softmax hardshrink hardsigmoid hardswish hardtanh hinge_embedding_loss huber_loss
    instance_norm kl_div l1_loss layer_norm leaky_relu linear log_softmax logsigmoid
    margin_ranking_loss mish mse_loss nll_loss normalize pairwise_distance pixel_shuffle
    pixel_unshuffle poisson_nll_loss prelu relu relu6 relu_ rms_norm rrelu
    scaled_dot_product_attention selu sigmoid silu smooth_l1_loss soft_margin_loss softmax softmin
    softplus softshrink softsign tanh tanhshrink threshold triplet_margin_loss multi_margin_loss
    multilabel_margin_loss multilabel_soft_margin_loss
""")
FUNCTIONAL_WINDOWS = str.split("""
    avg_pool1d avg_pool2d avg_pool3d local_response_norm max_pool1d max_pool2d max_pool3d
""")
FUNCTIONAL_BROADCASTING = str.split("bilinear embedding")
FUNCTIONAL_SIZED = str.split("""
    adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool1d
    adaptive_max_pool2d adaptive_max_pool3d conv1d conv2d conv3d conv_transpose1d conv_transpose2d
    conv_transpose3d fold interpolate pad unfold upsample
""")
LINALG = str.split("""
    cholesky cond cross det diagonal eigh eigvalsh inv lstsq matrix_exp matrix_norm matrix_rank
    multi_dot norm pinv qr slogdet solve svd svdvals vecdot vector_norm
""")
LINALG_BROADCASTING = str.split("matmul")
FFT = str.split("""
    fft fft2 fftn hfft ifft ifft2 ifftn ihfft irfft irfft2 irfftn rfft rfft2 rfftn fftfreq rfftfreq
""")
FFT_PLAIN = str.split("fftshift ifftshift")
SPECIAL = str.split("""
    bessel_j0 bessel_j1 digamma entr erf erfc erfcx erfinv exp2 expit expm1 gammainc gammaincc
    gammaln i0 i0e i1 i1e log1p log_ndtr log_softmax logit logsumexp ndtr ndtri psi round sinc
    softmax xlog1py xlogy
""")
INIT = str.split("""
    calculate_gain constant_ dirac_ eye_ kaiming_normal_ kaiming_uniform_ normal_ ones_ orthogonal_
    sparse_ trunc_normal_ uniform_ xavier_normal_ xavier_uniform_ zeros_
""")

# layers and losses of torch.nn, which peers may make and call
MODULES = str.split("""
    AdaptiveAvgPool1d AdaptiveAvgPool2d AdaptiveAvgPool3d AdaptiveMaxPool1d AdaptiveMaxPool2d
    AdaptiveMaxPool3d AlphaDropout AvgPool1d AvgPool2d AvgPool3d BCELoss BCEWithLogitsLoss
    BatchNorm1d BatchNorm2d BatchNorm3d Bilinear CELU ChannelShuffle CircularPad1d CircularPad2d
    CircularPad3d ConstantPad1d ConstantPad2d ConstantPad3d Conv1d Conv2d Conv3d ConvTranspose1d
    ConvTranspose2d ConvTranspose3d CosineEmbeddingLoss CosineSimilarity CrossEntropyLoss Dropout
    Dropout1d Dropout2d Dropout3d ELU Embedding FeatureAlphaDropout Flatten Fold GELU GLU GRU
    GRUCell GaussianNLLLoss GroupNorm Hardshrink Hardsigmoid Hardswish Hardtanh HingeEmbeddingLoss
    HuberLoss Identity InstanceNorm1d InstanceNorm2d InstanceNorm3d KLDivLoss L1Loss LSTM LSTMCell
    LayerNorm LeakyReLU Linear LocalResponseNorm LogSigmoid LogSoftmax MSELoss MarginRankingLoss
    MaxPool1d MaxPool2d MaxPool3d Mish MultiLabelMarginLoss MultiLabelSoftMarginLoss MultiMarginLoss
    MultiheadAttention NLLLoss PReLU PairwiseDistance PixelShuffle PixelUnshuffle PoissonNLLLoss
    RMSNorm RNN RNNCell RReLU ReLU ReLU6 ReflectionPad1d ReflectionPad2d ReflectionPad3d
    ReplicationPad1d ReplicationPad2d ReplicationPad3d SELU Sequential SiLU Sigmoid SmoothL1Loss
    SoftMarginLoss Softmax Softmax2d Softmin Softplus Softshrink Softsign Tanh Tanhshrink Threshold
    TransformerDecoderLayer TransformerEncoderLayer TripletMarginLoss Unflatten Unfold Upsample
    UpsamplingBilinear2d UpsamplingNearest2d ZeroPad1d ZeroPad2d ZeroPad3d Module ModuleDict
    ModuleList ParameterDict ParameterList EmbeddingBag
""")
OPTIMIZERS = str.split("""
    ASGD Adadelta Adafactor Adagrad Adam AdamW Adamax LBFGS NAdam Optimizer RAdam RMSprop Rprop SGD
    SparseAdam
""")
SCHEDULERS = str.split("""
    ChainedScheduler ConstantLR CosineAnnealingLR CosineAnnealingWarmRestarts CyclicLR ExponentialLR
    LRScheduler LambdaLR LinearLR MultiStepLR MultiplicativeLR OneCycleLR PolynomialLR
    ReduceLROnPlateau SequentialLR StepLR
""")

# methods of modules, optimizers and schedulers that torch defines
OF_MODULES = frozenset(
    str.split("""
    __call__ __contains__ __getitem__ __len__ __repr__ append bfloat16 buffers children cpu cuda
    double eval extend extra_repr float forward get get_buffer get_parameter get_submodule half
    insert items keys load_state_dict modules named_buffers named_children named_modules
    named_parameters parameters pop requires_grad_ reset_parameters state_dict to train update
    values zero_grad apply add_module clear
""")
)
OF_OPTIMIZERS = frozenset(
    str.split("""
    __repr__ add_param_group get_last_lr get_lr load_state_dict state_dict step zero_grad
""")
)
