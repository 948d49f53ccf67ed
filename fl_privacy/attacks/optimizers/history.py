"""The memory of L-BFGS for V victims, in the compact representation (Byrd, Nocedal, Schnabel 1994, Eq. 3.13)."""

import torch
from torch import Tensor

_MIN_CURVATURE = 1e-10
_FIRST_CAPACITY = 16


class History:
    """Pairs (s, y) of each victim in a ring of its own, oldest first once ordered.

    The direction costs two passes over the pairs, instead of four as 4 x ``limit`` small operations in the two-loop
    recursion; the small (limit x limit) matrices are kept in float64. Rows that hold fewer pairs than others have
    zeros in the unused slots, which drop out of every product.
    """

    def __init__(self, variables: Tensor, limit: int) -> None:
        v, n = variables.shape
        capacity = min(limit, _FIRST_CAPACITY)
        small = variables.new_zeros(0, dtype=torch.float64)
        self._limit = limit
        self._s = variables.new_zeros(v, capacity, n)
        self._y = variables.new_zeros(v, capacity, n)
        self._sy = small.new_zeros(v, capacity, capacity)
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
        both = torch.stack([gradient, y], 2)
        s_products = torch.bmm(self._s[:, :used], both).double()
        y_products = torch.bmm(self._y[:, :used], both).double()
        if len(rows):
            slots = (self._pushed[rows] - 1) % self._s.shape[1]
            self._sy[rows, :used, slots] = s_products[rows, :, 1]
            self._yy[rows, :used, slots] = y_products[rows, :, 1]
            self._yy[rows, slots, :used] = y_products[rows, :, 1]
        on_s, on_y = self._coefficients(s_products[..., 0], y_products[..., 0], used)
        dtype = gradient.dtype
        step = torch.bmm(on_s.to(dtype)[:, None], self._s[:, :used])[:, 0]
        step += torch.bmm(on_y.to(dtype)[:, None], self._y[:, :used])[:, 0]
        return -torch.addcmul(step, self._scale.to(dtype)[:, None], gradient)

    def _push(self, rows: Tensor, s: Tensor, y: Tensor, curvature: Tensor) -> None:
        if int(self._pushed.max()) >= self._s.shape[1] < self._limit:
            self._grow()
        slots = self._pushed[rows] % self._s.shape[1]
        self._s[rows, slots] = s[rows]
        self._y[rows, slots] = y[rows]
        self._scale[rows] = (curvature[rows] / y[rows].square().sum(1)).double()
        self._pushed[rows] += 1

    def _grow(self) -> None:
        more = min(self._limit, 2 * self._s.shape[1]) - self._s.shape[1]
        pad = torch.nn.functional.pad
        self._s, self._y = pad(self._s, (0, 0, 0, more)), pad(self._y, (0, 0, 0, more))
        self._sy, self._yy = pad(self._sy, (0, more, 0, more)), pad(self._yy, (0, more, 0, more))

    def _coefficients(self, sg: Tensor, yg: Tensor, used: int) -> tuple[Tensor, Tensor]:
        """Coefficients of H g on the pairs: w on s and -scale * a on y, with a = R^-1 S'g and
        w = R^-T ((D + scale Y'Y) a - scale Y'g)."""
        order = (self._pushed[:, None] + torch.arange(used, device=sg.device)) % used
        columns = order[:, None].expand(-1, used, -1)
        sy = self._sy[:, :used, :used].gather(1, order[..., None].expand(-1, -1, used)).gather(2, columns)
        yy = self._yy[:, :used, :used].gather(1, order[..., None].expand(-1, -1, used)).gather(2, columns)
        diagonal = sy.diagonal(dim1=1, dim2=2)
        upper = sy.triu() + torch.diag_embed((diagonal == 0).to(sy.dtype))
        scale = self._scale[:, None]
        a = torch.linalg.solve_triangular(upper, sg.gather(1, order)[..., None], upper=True)
        rhs = diagonal[..., None] * a + scale[..., None] * (yy @ a - yg.gather(1, order)[..., None])
        w = torch.linalg.solve_triangular(upper.mT, rhs, upper=False)
        on_s = torch.zeros_like(sg).scatter_(1, order, w[..., 0])
        on_y = torch.zeros_like(sg).scatter_(1, order, -scale * a[..., 0])
        return on_s, on_y

    def forget(self, rows: Tensor) -> None:
        """Drop the pairs of ``rows`` (V,) bool."""
        for pairs in (self._s, self._y, self._sy, self._yy):
            pairs[rows] = 0
        self._scale[rows] = 1
        self._pushed[rows] = 0

    def select(self, rows: Tensor) -> None:
        """Keep the victims ``rows``."""
        for name in ("_s", "_y", "_sy", "_yy", "_scale", "_pushed"):
            setattr(self, name, getattr(self, name)[rows])
