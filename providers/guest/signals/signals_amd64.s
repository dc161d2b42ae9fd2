#include "textflag.h"

// The kernel calls it like a C function, on the runtime's signal stack: DI is the signal, SI its siginfo_t, DX
// the context. Offsets of siginfo_t: 8 is si_code, 16 is si_pid.
//
// A code above 0 is the kernel's. 0 (SI_USER) is a kill and -6 (SI_TKILL) a tgkill; for these the kernel fills
// in the pid, 0 for a sender outside of the namespace. Any other code may come with a made-up pid (SI_QUEUE).
TEXT handle<>(SB), NOSPLIT|NOFRAME|TOPFRAME, $0
	MOVL	8(SI), AX
	CMPL	AX, $0
	JGT	obey
	JEQ	sender
	CMPL	AX, $-6
	JNE	drop
sender:
	CMPL	16(SI), $0
	JNE	drop
obey:
	MOVQ	·next(SB), AX
	JMP	AX
drop:
	RET

GLOBL	·entry(SB), NOPTR, $8
DATA	·entry(SB)/8, $handle<>(SB)
