"""What is remembered, and for whom: boundaries, pools, owners and the two cache managers.

A cache knows shapes, boundaries and owners. It never computes attention and never sees the model;
where it needs arithmetic (a codec, a cost) the function is handed in.
"""
