"""Differentiable collectives: each is the adjoint of another one."""
