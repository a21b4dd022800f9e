import sys

from benchmarks.small_cards.run import main

sys.exit(main())
