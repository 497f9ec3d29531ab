//! The Python class of scopes.

use crate::error::{OrRaise, invalid};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyTuple};
use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;

/// Everything besides tokens that decides whether bytes may be reused. `layers` and `kv_heads` are
/// pairs: the first, and one past the last. `page_bytes` follows from the shape if dtype and layout
/// are known; otherwise it must be given. Every field is part of the `id`, so a different `layout`
/// or `page_bytes` makes a different scope. Exception: the layouts `layer_first` and `page_first`
/// arrange a page's bytes equally, and make the same scope.
#[pyclass(frozen, module = "ritornello._core")]
pub(crate) struct Scope {
    pub(crate) inner: Arc<ritornello_format::Scope>,
    pub(crate) page_bytes: u64,
    id: [u8; 16],
}

impl Scope {
    pub(crate) fn of(py: Python<'_>, scope: ritornello_format::Scope) -> PyResult<Self> {
        let page_bytes = scope.resolved_page_bytes().or_raise(py)?;
        Ok(Self { id: scope.id().0, page_bytes, inner: Arc::new(scope) })
    }

    /// Returns one scope, or a sequence of scopes, as a list.
    pub(crate) fn some<'py>(given: &Bound<'py, PyAny>) -> PyResult<Vec<Bound<'py, Self>>> {
        if let Ok(scope) = given.cast::<Self>() {
            return Ok(vec![scope.clone()]);
        }
        let scopes: Option<Vec<_>> = given
            .try_iter()
            .ok()
            .and_then(|scopes| scopes.map(|scope| scope.ok()?.cast_into().ok()).collect());
        scopes.ok_or_else(|| invalid(given.py(), "scope must be a Scope, or a sequence of scopes"))
    }

    /// Adds to `fields` the arguments of `new` that make an equal scope, by name.
    fn fill(&self, fields: &Bound<'_, PyDict>) -> PyResult<()> {
        let (py, scope) = (fields.py(), &self.inner);
        fields.set_item("model", &scope.model)?;
        fields.set_item("dtype", &scope.dtype)?;
        fields.set_item("page_tokens", scope.page_tokens)?;
        fields.set_item("layers", scope.layers)?;
        fields.set_item("kv_heads", scope.kv_heads)?;
        fields.set_item("head_dim", scope.head_dim)?;
        fields.set_item("layout", &scope.layout)?;
        fields.set_item("salt", PyBytes::new(py, &scope.salt))?;
        fields.set_item("weights", PyBytes::new(py, &scope.weights))?;
        fields.set_item("adapter", &scope.adapter)?;
        fields.set_item("kv_scale", &scope.kv_scale)?;
        fields.set_item("hash_algorithm", &scope.hash_algorithm)?;
        fields.set_item("epoch", PyBytes::new(py, &scope.epoch))?;
        fields.set_item("part", scope.part)?;
        fields.set_item("extra", scope.extra.clone())?;
        fields.set_item("chained", scope.chained)?;
        fields.set_item("page_bytes", self.page_bytes)
    }
}

#[pymethods]
impl Scope {
    #[new]
    #[pyo3(
        signature = (
            model, dtype, page_tokens, *, layers, kv_heads, head_dim, layout="page_first",
            salt=Vec::new(), weights=Vec::new(), adapter="", kv_scale="none", hash_algorithm="", epoch=Vec::new(),
            part=0, extra=None, chained=true, page_bytes=None,
        ),
        text_signature = "(model, dtype, page_tokens, *, layers, kv_heads, head_dim, \
                          layout='page_first', salt=b'', weights=b'', adapter='', \
                          kv_scale='none', hash_algorithm='', epoch=b'', part=0, extra=None, \
                          chained=True, page_bytes=None)"
    )]
    // One parameter per field: Python callers pass them by name.
    #[allow(clippy::too_many_arguments)]
    fn new(
        py: Python<'_>,
        model: String,
        dtype: String,
        page_tokens: u32,
        layers: (u32, u32),
        kv_heads: (u32, u32),
        head_dim: u32,
        layout: &str,
        salt: Vec<u8>,
        weights: Vec<u8>,
        adapter: &str,
        kv_scale: &str,
        hash_algorithm: &str,
        epoch: Vec<u8>,
        part: u32,
        extra: Option<BTreeMap<String, String>>,
        chained: bool,
        page_bytes: Option<u64>,
    ) -> PyResult<Self> {
        let scope = ritornello_format::Scope {
            model,
            weights,
            adapter: adapter.to_owned(),
            dtype,
            kv_scale: kv_scale.to_owned(),
            page_tokens,
            layers,
            kv_heads,
            head_dim,
            hash_algorithm: hash_algorithm.to_owned(),
            salt,
            epoch,
            part,
            extra: extra.unwrap_or_default(),
            layout: layout.to_owned(),
            page_bytes,
            chained,
        };
        Self::of(py, scope)
    }

    /// Returns a scope that consists of a name, the bytes per page, and whether keys are chained.
    #[staticmethod]
    #[pyo3(signature = (name, page_bytes, *, chained=false))]
    fn opaque(py: Python<'_>, name: &str, page_bytes: u64, chained: bool) -> PyResult<Self> {
        Self::of(py, ritornello_format::Scope::opaque(name, page_bytes, chained))
    }

    /// The 16-byte digest of the scope's identity.
    #[getter]
    fn id<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &self.id)
    }

    /// Bytes per page, given or derived.
    #[getter]
    fn page_bytes(&self) -> u64 {
        self.page_bytes
    }

    /// Whether a key commits to all keys before it.
    #[getter]
    fn chained(&self) -> bool {
        self.inner.chained
    }

    /// Returns the keyword arguments that make an equal scope.
    fn describe<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let fields = PyDict::new(py);
        self.fill(&fields)?;
        Ok(fields)
    }

    fn __getnewargs_ex__<'py>(
        &self,
        py: Python<'py>,
    ) -> PyResult<(Bound<'py, PyTuple>, Bound<'py, PyDict>)> {
        Ok((PyTuple::empty(py), self.describe(py)?))
    }

    fn __eq__(&self, other: &Self) -> bool {
        self.id == other.id && self.inner.check_same(&other.inner).is_ok()
    }

    fn __hash__(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        self.id.hash(&mut hasher);
        hasher.finish()
    }

    fn __repr__(&self) -> String {
        let scope = &self.inner;
        let id = scope.id();
        format!(
            "Scope({:?}, {:?}, page_bytes={}, id={id})",
            scope.model, scope.dtype, self.page_bytes
        )
    }
}
