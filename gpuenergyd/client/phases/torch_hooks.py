"""Finds the phases of a torch training (forward, backward, optimizer) with torch's hooks; no code is patched.

Which event marks what:

    the outermost module begins a forward with gradients    a forward
    the first gradient of that module's output is computed   a backward
    autograd has computed all gradients                      communication that nothing hides
    an optimizer of that module's parameters begins, ends    an optimizer step
    that module, or the one that it wraps, runs without      a pause: an evaluation, a generation
    gradients, or its state is read, between iterations      or a checkpoint

DistributedDataParallel and FSDP2 wait for their gradients in callbacks that autograd calls after its computation. The
callback of this module is queued before theirs, so that the device reaches its event before it waits. Therefore no
communication hook is needed, and a program's own communication hook stays in place.

A global module hook slows down every call of every module, so it is removed once the outermost module is known. A loop
with one instruction per iteration keeps only a hook before that module, which detects evaluations.

The outermost module is the first one called with gradients in an iteration. If an optimizer with none of its parameters
then steps, another module is searched for, except in a loop without marks that steps several optimizers in turn. The
search also starts again when iterations no longer have phases, because the program trains another model.
Modules compiled in place (`module.compile()`) get no hooks, because torch would compile the hooks with them.
"""

import sys
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from typing import Any

from gpuenergyd.client.phases.marks import PhaseMarks

_MAX_OUTPUTS = 16
"""Most tensors of an output that are watched for the start of the backward."""
_MAX_SEARCHES = 4
_MAX_SEARCHED_CALLS = 20_000
"""Module calls after which the search ends in a program without a trained module."""
_WARNING_OF_GLOBAL_HOOKS = r"Using `torch\.compile\(module\)` when there are global hooks"
"""Torch says so when a compiled module is called."""


class TorchPhases:
    """Hooks of one training loop; `detach` removes them all.

    Torch raises if optimizer hooks are added or removed while it calls one. A caller inside such a hook therefore sets
    `registers_steps` to False, and calls `before_step` and `after_step` itself.
    """

    def __init__(self, torch: Any, marks: PhaseMarks, *, registers_steps: bool = True) -> None:
        """Start looking for the outermost module; `torch` is the already imported torch module."""
        self._torch = torch
        self._marks = marks
        self._root: weakref.ref[Any] | None = None
        self._is_root_proven = self._is_first_module = False
        self._others: weakref.WeakSet[Any] = weakref.WeakSet()
        self._num_searches = self._num_searched_calls = 0
        self._search_handle: Any = None
        self._root_handles: list[Any] = []
        self._optimizers: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()
        """Optimizers that have stepped, and whether they have parameters of the outermost module."""
        self._checkpoint_handles: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
        optimizers: Any = sys.modules["torch.optim.optimizer"]  # torch deletes the attributes of its modules
        self._handles: list[Any] = []
        marks.when_whole, marks.when_unseen = self._mark_whole_iterations, self._search_again
        if registers_steps:
            self._handles += [
                optimizers.register_optimizer_step_pre_hook(self.before_step),
                optimizers.register_optimizer_step_post_hook(self._after_step),
            ]
        self._search()

    def detach(self) -> None:
        """Remove all hooks."""
        self._stop_searching()
        for handle in (*self._handles, *self._root_handles, *self._checkpoint_handles.values()):
            handle.remove()
        self._handles.clear()
        self._root_handles.clear()
        self._checkpoint_handles.clear()

    def _mark_whole_iterations(self) -> None:
        """Keep only the hooks for evaluations and checkpoints, and for steps that end an unmarked iteration."""
        for handle in self._root_handles[1:2]:
            handle.remove()
        del self._root_handles[1:2]
        if not self._marks.follows_steps:
            for handle in self._handles:
                handle.remove()
            self._handles.clear()
        if self._root is not None:
            self._stop_searching()

    # --- the outermost module ---

    def _search(self) -> None:
        self._num_searches += 1
        if self._num_searches <= _MAX_SEARCHES:
            modules = self._torch.nn.modules.module
            if not getattr(modules, "_has_any_global_hook", bool)():  # of the program
                # The warning would be of this hook alone, and an exception in a program that makes warnings errors.
                warnings.filterwarnings("ignore", _WARNING_OF_GLOBAL_HOOKS)
            self._search_handle = modules.register_module_forward_pre_hook(self._on_any_forward)

    def _stop_searching(self) -> None:
        handle, self._search_handle = self._search_handle, None
        if handle is not None:
            handle.remove()

    def _on_any_forward(self, module: Any, _args: Any) -> None:
        if self._torch.compiler.is_compiling():
            return
        self._num_searched_calls += 1
        if self._num_searched_calls == _MAX_SEARCHED_CALLS:
            self._stop_searching()
        try:
            if module in self._others or not self._is_training(module) or not _is_trained(module):
                return
            self._stop_searching()  # the modules inside it are called without this hook
            self._follow(module)
        except Exception:  # noqa: BLE001  must not reach training
            self._marks.num_errors += 1

    def _follow(self, module: Any) -> None:
        self._root, self._is_root_proven = weakref.ref(module), False
        if getattr(module, "_compiled_call_impl", None) is not None:
            return
        # Registered before FSDP's own hooks, so that its callback at the end of the backward is queued after ours.
        self._root_handles = [
            module.register_forward_pre_hook(_ModuleHook(self._before_forward), prepend=True),
            module.register_forward_hook(_ModuleHook(self._after_forward), prepend=True),
        ]
        wrapped = self._wrapped_by(module)
        if wrapped is not module:  # evaluations often call it directly
            self._root_handles.append(wrapped.register_forward_pre_hook(_ModuleHook(self._before_wrapped_forward)))
        self._root_handles.append(wrapped.register_state_dict_pre_hook(_ModuleHook(self._before_checkpoint)))
        self._marks.forward_begins()

    def _wrapped_by(self, module: Any) -> Any:
        """Return the model inside a wrapper such as DistributedDataParallel; the module itself if it is not wrapped."""
        wrapped = None if hasattr(module, "_orig_mod") else getattr(module, "module", None)
        is_plain = isinstance(wrapped, self._torch.nn.Module) and getattr(wrapped, "_compiled_call_impl", None) is None
        return wrapped if is_plain else module

    def _is_training(self, module: Any) -> bool:
        return bool(module.training) and bool(self._torch.is_grad_enabled())

    def _is_of_root(self, optimizer: Any) -> bool:
        """Return whether an optimizer updates the outermost module; search for another module if it does not."""
        root = self._root() if self._root is not None else None
        if root is None:
            return True
        known = self._optimizers.get(optimizer)
        if known is None:
            of_root = {id(parameter) for parameter in root.parameters()}
            known = any(id(parameter) in of_root for group in optimizer.param_groups for parameter in group["params"])
            self._optimizers[optimizer] = known
            if optimizer not in self._checkpoint_handles:
                self._checkpoint_handles[optimizer] = optimizer.register_state_dict_pre_hook(self._before_checkpoint)
            if not known and not self._is_root_proven and not self._is_first_module:
                self._search_another(root)
        self._is_root_proven |= known
        return known

    def _search_another(self, root: Any) -> None:
        for handle in self._root_handles:
            handle.remove()
        self._root_handles.clear()
        self._root = None
        self._optimizers.clear()
        self._others.update(root.modules())
        self._search()

    def _search_first(self) -> None:
        """Take the first module of an iteration as the outermost one, whichever optimizer updates it."""
        self._is_first_module = True
        self._search_again()

    def _search_again(self) -> None:
        """Forget the outermost module, and search for the one that is trained from now on."""
        self._stop_searching()
        for handle in self._root_handles:
            handle.remove()
        self._root_handles.clear()
        self._root, self._is_root_proven = None, False
        self._num_searches = self._num_searched_calls = 0
        self._others.clear()
        self._optimizers.clear()
        self._search()

    # --- hooks ---

    def _before_forward(self, module: Any, _args: Any) -> None:
        marks = self._marks
        if self._torch.compiler.is_compiling() or marks.is_left_out or (marks.is_whole and marks.is_in_iteration):
            return
        if self._is_training(module):
            marks.forward_begins()
        else:
            marks.pause()  # an evaluation, unless it is part of an iteration

    def _before_wrapped_forward(self, module: Any, _args: Any) -> None:
        if not self._torch.compiler.is_compiling() and not self._is_training(module):
            self._marks.pause()

    def _after_forward(self, module: Any, _args: Any, output: Any) -> None:
        if self._torch.compiler.is_compiling() or self._marks.is_left_out or not self._is_training(module):
            return
        try:
            for number, tensor in enumerate(_tensors(output, self._torch.Tensor)):
                if number == _MAX_OUTPUTS:
                    break
                if tensor.requires_grad and not tensor.is_leaf:  # a leaf, such as a parameter, would collect hooks
                    tensor.register_hook(self._on_gradient)
        except Exception:  # noqa: BLE001  must not reach training
            self._marks.num_errors += 1

    def _on_gradient(self, _gradient: Any) -> None:
        try:
            if self._marks.backward_begins():
                # DistributedDataParallel and FSDP use this, too; torch has no public name for it.
                self._torch.autograd.Variable._execution_engine.queue_callback(  # noqa: SLF001  as above
                    self._marks.backward_ends
                )
        except Exception:  # noqa: BLE001  must not reach training
            self._marks.num_errors += 1

    def before_step(self, optimizer: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Mark the start of the step; if the step runs forward and backward in a closure, mark it after those."""
        if self._marks.is_left_out:
            return None
        try:
            if not self._is_of_root(optimizer):
                return None
            closure = args[1] if len(args) > 1 else kwargs.get("closure")
            if not callable(closure):
                self._marks.optimizer_begins()
                return None
            marked = self._marked(closure)
            if len(args) > 1:
                return (args[0], marked, *args[2:]), dict(kwargs)
            return args, {**kwargs, "closure": marked}
        except Exception:  # noqa: BLE001  must not reach training
            self._marks.num_errors += 1
            return None

    def _marked(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        def closure_then_step() -> Any:
            result = closure()
            self._marks.optimizer_begins()
            return result

        return closure_then_step

    def after_step(self, optimizer: Any) -> None:
        """Mark the end of a step."""
        if self._marks.is_left_out and not self._marks.follows_steps:
            return
        try:
            is_of_root = self._is_of_root(optimizer)
            if is_of_root:
                self._marks.optimizer_ends()
            self._marks.follow_step(optimizer, is_of_model=is_of_root and self._root is not None)
            if self._marks.begins_at_first_module and not self._is_first_module:
                self._search_first()
        except Exception:  # noqa: BLE001  must not reach training
            self._marks.num_errors += 1

    def _after_step(self, optimizer: Any, _args: Any, _kwargs: Any) -> None:
        self.after_step(optimizer)

    def _before_checkpoint(self, *_: Any) -> None:
        self._marks.pause()


class _ModuleHook:
    """A hook that does nothing in pickled copies of its module, which may be loaded without this package."""

    def __init__(self, act: Callable[..., None]) -> None:
        self._act = act

    def __call__(self, *args: Any) -> None:
        self._act(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        """Return a function of the standard library that accepts anything and returns None."""
        return getattr, (nullcontext(), "__exit__")


def _is_trained(module: Any) -> bool:
    return any(parameter.requires_grad for parameter in module.parameters())


def _tensors(output: Any, tensor_class: type) -> Iterator[Any]:
    """Yield the tensors of a module's output: alone, or in sequences and mappings."""
    if isinstance(output, tensor_class):
        yield output
    elif isinstance(output, Mapping):
        for value in output.values():
            yield from _tensors(value, tensor_class)
    elif isinstance(output, list | tuple):
        for value in output:
            yield from _tensors(value, tensor_class)
