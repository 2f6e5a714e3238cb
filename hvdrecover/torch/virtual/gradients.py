"""placeholder"""
import torch, horovod.torch as hvd
def _tree(stack, level, vec):
    stack.append((level, vec))
    while len(stack) > 1 and stack[-1][0] == stack[-2][0]:
        l, b = stack.pop(); _, a = stack.pop(); stack.append((l + 1, a + b))
class Gradients:
    def __init__(self, optimizer, size, name):
        self._ps = [p for g in optimizer.param_groups for p in g["params"]]
        self._size = size
        optimizer._allreduce_grad_async = lambda p: (None, None)
        optimizer.set_backward_passes_per_step(1 << 60)
        optimizer.synchronize = lambda: None
    def begin(self, counts, process):
        self._stack = []
        self._counts = counts
        for p in self._ps: p.grad = None
    def part_begins(self, *, last): pass
    def part_ends(self):
        self._stack.append(torch.cat([p.grad.flatten() if p.grad is not None else torch.zeros(p.numel()) for p in self._ps]))
        for p in self._ps: p.grad = None
    def finish(self):
        n = sum(p.numel() for p in self._ps)
        mine = torch.stack(self._stack) if self._stack else torch.zeros(0, n)
        rows = hvd.allgather(mine, name="g") if hvd.size() > 1 else mine
        st = []
        for row in rows: _tree(st, 0, row)
        while len(st) > 1:
            _, b = st.pop(); l, a = st.pop(); st.append((l, a + b))
        g = st[0][1] / self._size
        for p, x in zip(self._ps, g.split([p.numel() for p in self._ps])): p.grad = x.view_as(p).clone()
    def abandon(self): self._stack = []
