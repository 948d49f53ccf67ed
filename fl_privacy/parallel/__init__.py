"""Work on several GPUs or machines through Ray, which is imported when it is asked for.

``sharded.ShardedAttack`` deals the victims of any attack to tasks; ``cluster`` finds or starts what runs them.
"""
