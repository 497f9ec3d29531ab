//! Kernels: implementations of the codecs `split`, `int8` and `int4`, each for one instruction set.
//! The codec `zstd` runs the same code with every kernel.

use std::sync::OnceLock;

/// A kernel. Only kernels whose instructions this processor has can be constructed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Kernel(pub(crate) Instructions);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Instructions {
    Scalar,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    #[cfg(target_arch = "x86_64")]
    Avx512,
    #[cfg(target_arch = "aarch64")]
    Neon,
}

impl Kernel {
    /// The portable kernel. All other kernels must encode a slice to the same bytes.
    pub const SCALAR: Self = Self(Instructions::Scalar);

    /// All kernels that this processor can run, the fastest last.
    #[must_use]
    pub fn available() -> &'static [Self] {
        static AVAILABLE: OnceLock<Vec<Kernel>> = OnceLock::new();
        AVAILABLE.get_or_init(|| {
            let mut kernels = vec![Self::SCALAR];
            #[cfg(target_arch = "x86_64")]
            {
                if is_x86_feature_detected!("avx2")
                    && is_x86_feature_detected!("bmi1")
                    && is_x86_feature_detected!("popcnt")
                {
                    kernels.push(Self(Instructions::Avx2));
                    if is_x86_feature_detected!("avx512f")
                        && is_x86_feature_detected!("avx512bw")
                        && is_x86_feature_detected!("avx512vl")
                        && is_x86_feature_detected!("avx512vbmi")
                        && is_x86_feature_detected!("avx512vbmi2")
                    {
                        kernels.push(Self(Instructions::Avx512));
                    }
                }
            }
            #[cfg(target_arch = "aarch64")]
            if std::arch::is_aarch64_feature_detected!("neon") {
                kernels.push(Self(Instructions::Neon));
            }
            kernels
        })
    }

    /// The fastest kernel that this processor can run.
    #[must_use]
    pub fn best() -> Self {
        Self::available().last().copied().unwrap_or(Self::SCALAR)
    }

    /// The kernel's name in the reports of `bench codec`.
    #[must_use]
    pub const fn word(self) -> &'static str {
        match self.0 {
            Instructions::Scalar => "scalar",
            #[cfg(target_arch = "x86_64")]
            Instructions::Avx2 => "avx2",
            #[cfg(target_arch = "x86_64")]
            Instructions::Avx512 => "avx512",
            #[cfg(target_arch = "aarch64")]
            Instructions::Neon => "neon",
        }
    }
}

/// Calls a function that the compiler vectorises for the kernel's instructions. The function must
/// be `#[inline(always)]`.
macro_rules! vectorised {
    ($kernel:expr, $body:path, ($($name:ident: $type:ty),* $(,)?) $(-> $result:ty)?) => {{
        #[cfg(target_arch = "x86_64")]
        #[target_feature(enable = "avx2")]
        fn avx2($($name: $type),*) $(-> $result)? {
            $body($($name),*)
        }
        #[cfg(target_arch = "x86_64")]
        #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vbmi,avx512vbmi2")]
        fn avx512($($name: $type),*) $(-> $result)? {
            $body($($name),*)
        }
        match $kernel.0 {
            // SAFETY: a `Kernel` exists only where the processor has its instructions.
            #[cfg(target_arch = "x86_64")]
            $crate::kernel::Instructions::Avx2 => unsafe { avx2($($name),*) },
            // SAFETY: a `Kernel` exists only where the processor has its instructions.
            #[cfg(target_arch = "x86_64")]
            $crate::kernel::Instructions::Avx512 => unsafe { avx512($($name),*) },
            _ => $body($($name),*),
        }
    }};
}
pub(crate) use vectorised;
