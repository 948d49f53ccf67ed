"""The memory of L-BFGS for V victims, in the compact representation (Byrd, Nocedal, Schnabel 1994, Eq. 3.13)."""

import torch
import torch.nn.functional as F
from torch import Tensor

_MIN_CURVATURE = 1e-10
_FIRST_CAPACITY = 16


class History:
    """Pairs (s, y) of each victim in a ring of its own.

    The direction costs two passes over the pairs, instead of four as 4 x ``limit`` small operations in the two-loop
    recursion; the small (limit x limit) matrices S'Y and Y'Y are kept in float64, oldest pair first. Victims that hold
    fewer pairs than others have zeros in the unused slots, which drop out of every product.
    """

    def __init__(self, variables: Tensor, limit: int) -> None:
        v, n = variables.shape
        capacity = min(limit, _FIRST_CAPACITY)
        small = variables.new_zeros(0, dtype=torch.float64)
        self._limit = limit
        self._s = variables.new_zeros(v, capacity, n)
        self._y = variables.new_zeros(v, capacity, n)
        self._sy = _unit(small.new_zeros(v, capacity, capacity))
        self._yy = small.new_zeros(v, capacity, capacity)
        self._scale = small.new_ones(v)
        self._pushed = torch.zeros(v, dtype=torch.long, device=variables.device)

    def direction(self, gradient: Tensor, y: Tensor, s: Tensor, learns: Tensor) -> Tensor:
        """-H g of each victim (V, N), after the pair (s, y) was taken up where ``learns`` and it has curvature."""
        curvature = (y * s).sum(1)
        rows = (learns & (curvature > _MIN_CURVATURE)).nonzero().flatten()
        if len(rows):
            self._push(rows, s, y, curvature)
        used = int(self._pushed.max().clamp_max(self._s.shape[1]))
        if used == 0:
            return -gradient
        # this way round, the products run along the pairs as they lie in memory
        both = torch.stack([gradient, y], 1)
        slots = self._by_age(used)[:, None].expand(-1, 2, -1)
        s_products = torch.bmm(both, self._s[:, :used].mT).double().gather(2, slots)
        y_products = torch.bmm(both, self._y[:, :used].mT).double().gather(2, slots)
        if len(rows):
            newest = self._pushed[rows].clamp_max(self._s.shape[1]) - 1
            self._sy[rows, :used, newest] = s_products[rows, 1]
            self._yy[rows, :used, newest] = y_products[rows, 1]
            self._yy[rows, newest, :used] = y_products[rows, 1]
        on_s, on_y = self._coefficients(s_products[:, 0], y_products[:, 0])
        dtype = gradient.dtype
        step = torch.bmm(on_s.to(dtype)[:, None], self._s[:, :used])[:, 0]
        step += torch.bmm(on_y.to(dtype)[:, None], self._y[:, :used])[:, 0]
        return -torch.addcmul(step, self._scale.to(dtype)[:, None], gradient)

    def _by_age(self, used: int) -> Tensor:
        """Slots (V, used) of each victim's pairs, oldest first."""
        capacity = self._s.shape[1]
        oldest = (self._pushed - capacity).clamp_min(0)
        return (oldest[:, None] + torch.arange(used, device=oldest.device)) % capacity

    def _push(self, rows: Tensor, s: Tensor, y: Tensor, curvature: Tensor) -> None:
        if int(self._pushed[rows].max()) >= self._s.shape[1] < self._limit:
            self._grow()
        slots = self._pushed[rows] % self._s.shape[1]
        full = rows[self._pushed[rows] >= self._s.shape[1]]
        if len(full):
            self._sy[full] = F.pad(self._sy[full, 1:, 1:], (0, 1, 0, 1))
            self._yy[full] = F.pad(self._yy[full, 1:, 1:], (0, 1, 0, 1))
        self._s[rows, slots] = s[rows]
        self._y[rows, slots] = y[rows]
        self._scale[rows] = (curvature[rows] / y[rows].square().sum(1)).double()
        self._pushed[rows] += 1

    def _grow(self) -> None:
        old = self._s.shape[1]
        more = min(self._limit, 2 * old) - old
        self._s, self._y = F.pad(self._s, (0, 0, 0, more)), F.pad(self._y, (0, 0, 0, more))
        self._sy, self._yy = F.pad(self._sy, (0, more, 0, more)), F.pad(self._yy, (0, more, 0, more))
        _unit(self._sy[:, old:, old:])

    def _coefficients(self, sg: Tensor, yg: Tensor) -> tuple[Tensor, Tensor]:
        """Coefficients of H g on the pairs: w on s and -scale * a on y, with a = R^-1 S'g and
        w = R^-T ((D + scale Y'Y) a - scale Y'g)."""
        used = sg.shape[1]
        upper, yy, scale = self._sy[:, :used, :used], self._yy[:, :used, :used], self._scale[:, None, None]
        a = torch.linalg.solve_triangular(upper, sg[..., None], upper=True)
        rhs = upper.diagonal(dim1=1, dim2=2)[..., None] * a + scale * (yy @ a - yg[..., None])
        w = torch.linalg.solve_triangular(upper.mT, rhs, upper=False)
        slots = self._by_age(used)
        on_s = torch.zeros_like(sg).scatter_(1, slots, w[..., 0])
        on_y = torch.zeros_like(sg).scatter_(1, slots, (-scale * a)[..., 0])
        return on_s, on_y

    def forget(self, rows: Tensor) -> None:
        """Drop the pairs of ``rows`` (V,) bool."""
        for pairs in (self._s, self._y, self._sy, self._yy):
            pairs[rows] = 0
        self._sy[rows] = _unit(self._sy[rows])
        self._scale[rows] = 1
        self._pushed[rows] = 0

    def select(self, rows: Tensor) -> None:
        """Keep the victims ``rows``."""
        for name in ("_s", "_y", "_sy", "_yy", "_scale", "_pushed"):
            setattr(self, name, getattr(self, name)[rows])


def _unit(matrices: Tensor) -> Tensor:
    """Ones on the diagonals, in place: what leaves unused slots out of a triangular system."""
    matrices.diagonal(dim1=-2, dim2=-1).fill_(1)
    return matrices
