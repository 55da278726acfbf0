"""Models by name: own small ones, and builders over timm, torchvision and a user's own code.

``catalog`` knows names and signatures and imports no torch; ``build`` makes the model.
"""
