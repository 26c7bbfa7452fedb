import dataclasses
import math

from tfshard.layouts import FlatForm, itemsize


@dataclasses.dataclass(frozen=True)
class ParameterAnalyzer:
    group_threshold_bytes: int = 1 << 20
    max_group_bytes: int = 25 << 20

    def group(self, layouts, *, mesh_shape):
        bins = {}
        out = list(layouts)
        n = 0
        for i, l in enumerate(layouts):
            b = math.prod(l.spec.shape) * itemsize(l.spec.dtype)
            if not l.spec.trainable or "float" not in l.spec.dtype or b >= self.group_threshold_bytes:
                continue
            bins.setdefault((l.spec.dtype, frozenset(a for a in l.compute if a)), []).append(i)
        for (dt, _), idx in bins.items():
            if len(idx) < 2:
                continue
            form = FlatForm.pack([(layouts[i].spec.shape, layouts[i].compute) for i in idx], mesh_shape, itemsize(dt))
            for m, i in enumerate(idx):
                out[i] = dataclasses.replace(layouts[i], sharded=None, flat=form, grouped=True, group=n, member=m)
            n += 1
        return tuple(out)
