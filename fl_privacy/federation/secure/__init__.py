"""Rounds in which the server adds up what it can't read; needs TenSEAL.

``encrypted.run_encrypted`` runs them, with the keys and sums of ``ckks`` and the slots of ``packing``.
"""
