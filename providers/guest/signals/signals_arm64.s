#include "textflag.h"

// As in signals_amd64.s: R0 is the signal, R1 its siginfo_t, R2 the context, R30 the way back to the kernel.
TEXT handle<>(SB), NOSPLIT|NOFRAME|TOPFRAME, $0
	MOVW	8(R1), R3
	CMPW	$0, R3
	BGT	obey
	BEQ	sender
	CMPW	$-6, R3
	BNE	drop
sender:
	MOVWU	16(R1), R4
	CBNZW	R4, drop
obey:
	MOVD	·next(SB), R3
	JMP	(R3)
drop:
	RET

GLOBL	·entry(SB), NOPTR, $8
DATA	·entry(SB)/8, $handle<>(SB)
