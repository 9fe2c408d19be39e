"""Names that a spec may not use because the emitted code already means something by them."""

MAX_NAME = 64

CPP_KEYWORDS = frozenset(
    """
    alignas alignof and and_eq asm auto bitand bitor bool break case catch char char8_t char16_t
    char32_t class compl concept const consteval constexpr constinit const_cast continue co_await
    co_return co_yield decltype default delete do double dynamic_cast else enum explicit export
    extern false float for friend goto if inline int long mutable namespace new noexcept not not_eq
    nullptr operator or or_eq private protected public register reinterpret_cast requires return
    short signed sizeof static static_assert static_cast struct switch template this thread_local
    throw true try typedef typeid typename union unsigned using virtual void volatile wchar_t while
    xor xor_eq final override main
    threadIdx blockIdx blockDim gridDim warpSize dim3 float2 float4 int2 int4 half
    """.split()  # noqa: SIM905 - words read better than a list
)

# Plain words that YAML 1.1 readers take for a boolean or for nothing.
YAML_WORDS = frozenset(("yes", "no", "on", "off", "true", "false", "null"))

# Attributes of torch.nn.Module, and names that the emitted module uses itself.
MODULE_ATTRIBUTES = frozenset(
    """
    T_destination add_module apply bfloat16 buffers call_super_init children compile cpu cuda
    double dump_patches eval extra_repr float forward get_buffer get_extra_state get_parameter
    get_submodule half ipu load_state_dict modules mtia named_buffers named_children named_modules
    named_parameters parameters register_backward_hook register_buffer register_forward_hook
    register_forward_pre_hook register_full_backward_hook register_full_backward_pre_hook
    register_load_state_dict_post_hook register_load_state_dict_pre_hook register_module
    register_parameter register_state_dict_post_hook register_state_dict_pre_hook
    requires_grad_ set_extra_state set_submodule share_memory state_dict to to_empty train
    training type xpu zero_grad N conv_out package_name workspace y
    conv conv_bias conv_weight group_norm gamma beta x v device dtype in_channels out_channels
    kernel_size num_groups torch nn self
    """.split()  # noqa: SIM905 - words read better than a list
)
