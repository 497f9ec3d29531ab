"""Measurements that need an interpreter; `ritornello bench store` starts them."""
